"""The zoo's table: which class of `transformers`, from what changes of its defaults, on what inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """`kind`: the inputs, a function of inputs.py. `changes`: entries of the configuration, over the small ones.

    `transformer`: projections and attention are most of its work. `mean_squares`: it has no loss of its own on these
    inputs. `specialise`: it branches on data.
    """

    name: str
    family: str
    model_class: str
    kind: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    transformer: bool = True
    mean_squares: bool = False
    specialise: bool = False


_SPEECH = {
    "conv_dim": [20, 20, 20],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
    "output_hidden_size": 48,
}
_VIDEO = {"num_frames": 4}
_SEASONS = {"prediction_length": 6, "context_length": 17, "num_time_features": 2}
_SERIES = {"num_input_channels": 3, "context_length": 32, "prediction_length": 6}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 6}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 6},
    "codegen": {"rotary_dim": 6},
    "opt": {"word_embed_proj_dim": 48},
    "ctrl": {"dff": 88},
    "stablelm": {"partial_rotary_factor": 0.5},
    "xglm": {"num_layers": 2, "attention_heads": 4},
    "albert": {"embedding_size": 30},
    "electra": {"embedding_size": 30},
    "convbert": {"embedding_size": 30},
    "mobilebert": {"embedding_size": 30, "intra_bottleneck_size": 24, "true_hidden_size": 24},
    "layoutlm": {"max_2d_position_embeddings": 40},
    "rembert": {"input_embedding_size": 30, "output_embedding_size": 34},
    "squeezebert": {"embedding_size": 48},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 40},
    "t5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0, "local_radius": 5},
    "switch_transformers": {"decoder_start_token_id": 0},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 6},
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 6, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "paligemma": {"projection_dim": 48, "vision_config.projection_dim": 48},
    "dots1": {"n_shared_experts": 1},
    "mamba2": {"num_heads": 4, "head_dim": 24, "n_groups": 1, "state_size": 8, "chunk_size": 6},
    "bamba": _MAMBA2,
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 96},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"]},
    "zamba": {"layer_types": ["mamba", "hybrid"], "num_key_value_heads": 4, "attention_head_dim": 24},
    "zamba2": {**_MAMBA2, "layer_types": ["mamba", "hybrid"], "num_key_value_heads": 4, "attention_head_dim": 24},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
                   "linear_key_head_dim": 10,
                   "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "beit": {},
    "levit": {"num_attention_heads": [2, 2, 4], "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
              "image_size": 64},
    "convnext": {"patch_size": 4},
    "convnextv2": {"patch_size": 4},
    "swin": {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    "swinv2": {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    "mobilevitv2": {"patch_size": 1, "width_multiplier": 0.25},
    "mobilevit": {"patch_size": 2, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 12, 16, 20, 24, 28, 40]},
    "bit": {"hidden_sizes": [32, 32, 64, 64], "embedding_size": 32, "depths": [1, 1, 1, 1], "num_groups": 4},
    "mobilenet_v1": {"depth_multiplier": 0.1},
    "mobilenet_v2": {"depth_multiplier": 0.15},
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "patch_size": 4, "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "swiftformer": {"embed_dims": [16, 24, 32, 40], "depths": [1, 1, 1, 1]},
    "pvt": {"patch_sizes": [4, 2, 2, 2]},
    "efficientnet": {"hidden_dim": 40, "width_coefficient": 0.25, "depth_coefficient": 0.25},
    "resnet": {"hidden_sizes": [16, 24, 32, 40], "embedding_size": 12, "depths": [1, 1, 1, 1]},
    "regnet": {"hidden_sizes": [16, 24, 32, 48], "embedding_size": 12, "groups_width": 8},
    "dpt": {"neck_hidden_sizes": [12, 16, 20, 24], "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 16},
    "videomae": _VIDEO,
    "timesformer": _VIDEO,
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "sew", "unispeech", "wav2vec2-conformer"), _SPEECH),
    "data2vec-audio": {**_SPEECH, "conv_pos_kernel_size": 5},
    "wav2vec2-bert": {"output_hidden_size": 48, "feature_projection_input_dim": 26},
    "speech_to_text": {"conv_channels": 30, "input_feat_per_channel": 20},
    "audio-spectrogram-transformer": {"max_length": 24},
    "siglip": {"text_config.projection_size": 48},
    "patchtst": _SERIES,
    "patchtsmixer": _SERIES,
    "time_series_transformer": _SEASONS,
    "kosmos-2": {"latent_query_num": 4},
    "decision_transformer": {"max_ep_len": 30},
}  # fmt: skip


def _rows(family: str, kind: str, text: str, **common: Any) -> Iterator[Architecture]:
    for line in text.split():
        name, model_class = line.split(":")
        yield Architecture(name, family, model_class, kind, name, _CHANGES.get(name, {}), **common)


ARCHITECTURES: tuple[Architecture, ...] = (
    *_rows(
        "causal", "text",
        """gpt2:GPT2LMHeadModel gpt_neo:GPTNeoForCausalLM gpt_neox:GPTNeoXForCausalLM gptj:GPTJForCausalLM
        opt:OPTForCausalLM llama:LlamaForCausalLM qwen2:Qwen2ForCausalLM qwen3:Qwen3ForCausalLM
        gemma:GemmaForCausalLM gemma3_text:Gemma3ForCausalLM phi:PhiForCausalLM falcon:FalconForCausalLM
        mpt:MptForCausalLM stablelm:StableLmForCausalLM starcoder2:Starcoder2ForCausalLM cohere:CohereForCausalLM
        olmo2:Olmo2ForCausalLM granite:GraniteForCausalLM codegen:CodeGenForCausalLM nemotron:NemotronForCausalLM
        glm4:Glm4ForCausalLM smollm3:SmolLM3ForCausalLM xglm:XGLMForCausalLM ctrl:CTRLLMHeadModel
        openai-gpt:OpenAIGPTLMHeadModel gpt_bigcode:GPTBigCodeForCausalLM exaone4:Exaone4ForCausalLM
        diffllama:DiffLlamaForCausalLM bitnet:BitNetForCausalLM lfm2:Lfm2ForCausalLM doge:DogeForCausalLM""",
    ),
    *_rows(
        "causal", "padded_text",
        """bloom:BloomForCausalLM mistral:MistralForCausalLM gemma2:Gemma2ForCausalLM phi3:Phi3ForCausalLM
        persimmon:PersimmonForCausalLM biogpt:BioGptForCausalLM helium:HeliumForCausalLM""",
    ),
    *_rows(
        "moe", "text",
        """mixtral:MixtralForCausalLM qwen2_moe:Qwen2MoeForCausalLM qwen3_moe:Qwen3MoeForCausalLM
        olmoe:OlmoeForCausalLM deepseek_v2:DeepseekV2ForCausalLM deepseek_v3:DeepseekV3ForCausalLM
        gpt_oss:GptOssForCausalLM granitemoe:GraniteMoeForCausalLM jetmoe:JetMoeForCausalLM
        phimoe:PhimoeForCausalLM glm4_moe:Glm4MoeForCausalLM dots1:Dots1ForCausalLM""",
    ),
    *_rows(
        "state-space", "text",
        """mamba:MambaForCausalLM mamba2:Mamba2ForCausalLM falcon_mamba:FalconMambaForCausalLM
        recurrent_gemma:RecurrentGemmaForCausalLM rwkv:RwkvForCausalLM""",
        transformer=False,
    ),
    *_rows(
        "hybrid", "text",
        """jamba:JambaForCausalLM bamba:BambaForCausalLM falcon_h1:FalconH1ForCausalLM
        qwen3_next:Qwen3NextForCausalLM""",
        transformer=False,
    ),
    *_rows(
        "masked", "padded_text",
        """bert:BertForMaskedLM roberta:RobertaForMaskedLM distilbert:DistilBertForMaskedLM albert:AlbertForMaskedLM
        electra:ElectraForMaskedLM deberta:DebertaForMaskedLM deberta-v2:DebertaV2ForMaskedLM
        mpnet:MPNetForMaskedLM camembert:CamembertForMaskedLM layoutlm:LayoutLMForMaskedLM
        big_bird:BigBirdForMaskedLM convbert:ConvBertForMaskedLM squeezebert:SqueezeBertForMaskedLM
        mobilebert:MobileBertForMaskedLM modernbert:ModernBertForMaskedLM nystromformer:NystromformerForMaskedLM
        rembert:RemBertForMaskedLM roformer:RoFormerForMaskedLM esm:EsmForMaskedLM
        megatron-bert:MegatronBertForMaskedLM xlm:XLMWithLMHeadModel funnel:FunnelForMaskedLM""",
    ),
    *_rows("masked", "text", "fnet:FNetForMaskedLM"),
    *_rows("masked", "padded_text", "longformer:LongformerForMaskedLM", specialise=True),
    *_rows(
        "seq2seq", "translation",
        """t5:T5ForConditionalGeneration mt5:MT5ForConditionalGeneration umt5:UMT5ForConditionalGeneration
        bart:BartForConditionalGeneration mbart:MBartForConditionalGeneration
        pegasus:PegasusForConditionalGeneration marian:MarianMTModel blenderbot:BlenderbotForConditionalGeneration
        m2m_100:M2M100ForConditionalGeneration longt5:LongT5ForConditionalGeneration
        plbart:PLBartForConditionalGeneration bigbird_pegasus:BigBirdPegasusForConditionalGeneration
        switch_transformers:SwitchTransformersForConditionalGeneration nllb-moe:NllbMoeForConditionalGeneration""",
    ),
    *_rows("seq2seq", "translation", "led:LEDForConditionalGeneration", specialise=True),
    *_rows(
        "vision", "image",
        """vit:ViTForImageClassification deit:DeiTForImageClassification beit:BeitForImageClassification
        swin:SwinForImageClassification swinv2:Swinv2ForImageClassification dinov2:Dinov2ForImageClassification
        pvt:PvtForImageClassification segformer:SegformerForImageClassification
 ijepa:IJepaForImageClassification
        data2vec-vision:Data2VecVisionForImageClassification siglip:SiglipForImageClassification""",
    ),
    *_rows(
        "vision", "image",
        """convnext:ConvNextForImageClassification convnextv2:ConvNextV2ForImageClassification
        resnet:ResNetForImageClassification regnet:RegNetForImageClassification
        mobilevit:MobileViTForImageClassification mobilevitv2:MobileViTV2ForImageClassification
        poolformer:PoolFormerForImageClassification mobilenet_v1:MobileNetV1ForImageClassification
        mobilenet_v2:MobileNetV2ForImageClassification focalnet:FocalNetForImageClassification
        bit:BitForImageClassification swiftformer:SwiftFormerForImageClassification""",
        transformer=False,
    ),
    *_rows("vision", "only_image", "dpt:DPTForDepthEstimation", mean_squares=True),
    *_rows(
        "video", "video",
        """videomae:VideoMAEForVideoClassification timesformer:TimesformerForVideoClassification
        vivit:VivitForVideoClassification""",
    ),
    *_rows(
        "speech", "waves",
        """wav2vec2:Wav2Vec2ForCTC hubert:HubertForCTC wavlm:WavLMForCTC sew:SEWForCTC unispeech:UniSpeechForCTC
        data2vec-audio:Data2VecAudioForCTC wav2vec2-conformer:Wav2Vec2ConformerForCTC""",
        mean_squares=True,
    ),
    *_rows("speech", "audio_frames", "wav2vec2-bert:Wav2Vec2BertForCTC", mean_squares=True),
    *_rows("speech", "dictation", "whisper:WhisperForConditionalGeneration"),
    *_rows("speech", "frames_to_text", "speech_to_text:Speech2TextForConditionalGeneration"),
    *_rows("speech", "waves_to_text", "moonshine:MoonshineForConditionalGeneration"),
    *_rows("speech", "audio_class", "audio-spectrogram-transformer:ASTForAudioClassification"),
    *_rows(
        "multimodal", "pairs",
        "clip:CLIPModel altclip:AltCLIPModel chinese_clip:ChineseCLIPModel blip:BlipModel",
    ),
    *_rows("multimodal", "image_and_text", "git:GitForCausalLM"),
    *_rows("multimodal", "image_tokens", "llava:LlavaForConditionalGeneration"),
    *_rows("multimodal", "image_tokens", "internvl:InternVLForConditionalGeneration"),
    *_rows("multimodal", "image_tokens", "paligemma:PaliGemmaForConditionalGeneration"),
    *_rows("multimodal", "regions", "visual_bert:VisualBertForQuestionAnswering"),
    *_rows("multimodal", "only_pair", "flava:FlavaModel", mean_squares=True),
    *_rows("series", "series", "patchtst:PatchTSTForPrediction patchtsmixer:PatchTSMixerForPrediction"),
    *_rows("series", "seasons", "time_series_transformer:TimeSeriesTransformerModel", mean_squares=True),
    *_rows("series", "games", "decision_transformer:DecisionTransformerModel", mean_squares=True),
)  # fmt: skip
