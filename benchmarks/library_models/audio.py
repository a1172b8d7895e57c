"""Models of sound: torchaudio, speechbrain, conformers, source separation."""

from __future__ import annotations

from typing import Any

from library_models.rows import real, row, use, whole


def full(samples: Any, length: int) -> Any:
    """Return the lengths of samples that have no padding."""
    return use("torch.full")((len(samples),), length)


CONFORMER = {"input_dim": 16, "num_heads": 2, "ffn_dim": 32, "num_layers": 2, "depthwise_conv_kernel_size": 3}
TORCHAUDIO = "torchaudio.models"
row(
    "torchaudio",
    "ta_conformer",
    (f"{TORCHAUDIO}.Conformer", CONFORMER),
    a=real(12, 16),
    call=lambda net, a: net(a, full(a, 12)),
)
row(
    "torchaudio",
    "ta_emformer",
    (
        f"{TORCHAUDIO}.Emformer",
        {
            "input_dim": 16,
            "num_heads": 2,
            "ffn_dim": 32,
            "num_layers": 2,
            "segment_length": 4,
            "right_context_length": 2,
        },
    ),
    a=real(14, 16),
    call=lambda net, a: net(a, full(a, 12)),
)
row(
    "torchaudio",
    "ta_tacotron2",
    (
        f"{TORCHAUDIO}.Tacotron2",
        {
            "n_symbol": 20,
            "n_mels": 8,
            "symbol_embedding_dim": 16,
            "encoder_embedding_dim": 16,
            "encoder_n_convolution": 1,
            "decoder_rnn_dim": 16,
            "prenet_dim": 8,
            "attention_rnn_dim": 16,
            "attention_hidden_dim": 8,
            "attention_location_n_filter": 4,
            "postnet_embedding_dim": 16,
            "postnet_n_convolution": 2,
        },
    ),
    a=whole(20, 6),
    b=real(8, 5),
    call=lambda net, a, b: net(a, full(a, 6), b, full(a, 5)),
)
row(
    "torchaudio",
    "ta_wav2vec2",
    lambda: use(f"{TORCHAUDIO}.wav2vec2_model")(
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(8, 10, 5), (8, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=16,
        encoder_projection_dropout=0.1,
        encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=2,
        encoder_num_layers=2,
        encoder_num_heads=2,
        encoder_attention_dropout=0.1,
        encoder_ff_interm_features=32,
        encoder_ff_interm_dropout=0.1,
        encoder_dropout=0.1,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=10,
    ),
    a=real(400),
)
row(
    "torchaudio",
    "ta_deepspeech",
    (f"{TORCHAUDIO}.DeepSpeech", {"n_feature": 16, "n_hidden": 16, "n_class": 10}),
    a=real(1, 8, 16),
)
row(
    "torchaudio",
    "ta_wav2letter",
    (f"{TORCHAUDIO}.Wav2Letter", {"num_classes": 10, "input_type": "mfcc", "num_features": 13}),
    a=real(13, 60),
)
row(
    "torchaudio",
    "ta_convtasnet",
    (
        f"{TORCHAUDIO}.ConvTasNet",
        {
            "enc_kernel_size": 16,
            "enc_num_feats": 16,
            "msk_num_feats": 8,
            "msk_num_hidden_feats": 16,
            "msk_num_layers": 2,
            "msk_num_stacks": 1,
        },
    ),
    a=real(1, 160),
)
row(
    "torchaudio",
    "ta_wavernn",
    (
        f"{TORCHAUDIO}.WaveRNN",
        {
            "upsample_scales": [2, 2],
            "n_classes": 8,
            "hop_length": 4,
            "n_res_block": 1,
            "n_rnn": 16,
            "n_fc": 16,
            "kernel_size": 3,
            "n_freq": 8,
            "n_hidden": 8,
            "n_output": 8,
        },
    ),
    a=real(1, 16),
    b=real(1, 8, 6),
)
row("torchaudio", "ta_squim", ("torchaudio.models.squim_objective_base", {}), size=2, a=real(2000))
row(
    "torchaudio",
    "ta_mel_ctc",
    lambda: (
        use("torchaudio.transforms.MelSpectrogram")(n_mels=16, n_fft=64),
        use("torch.nn.LSTM")(16, 16, batch_first=True, bidirectional=True),
        use("torch.nn.Linear")(32, 10),
    ),
    call=lambda mel, rnn, head, a, b: use("torch.nn.functional.ctc_loss")(
        head(rnn(mel(a).transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1), b, (12,) * 4, (4,) * 4
    ),
    a=real(400),
    b=whole(9, 4),
)
row(
    "conformer",
    "conformer",
    ("conformer.Conformer", {"dim": 16, "depth": 2, "dim_head": 8, "heads": 2, "conv_kernel_size": 7}),
    a=real(12, 16),
)
row(
    "BS-RoFormer",
    "bs_roformer",
    (
        "bs_roformer.BSRoformer",
        {
            "dim": 16,
            "depth": 1,
            "dim_head": 8,
            "heads": 2,
            "stft_n_fft": 64,
            "stft_hop_length": 16,
            "stft_win_length": 64,
            "freqs_per_bands": (8, 8, 17),
            "flash_attn": False,
            "multi_stft_resolutions_window_sizes": (64, 32),
            "multi_stft_hop_size": 16,
        },
    ),
    a=real(512),
    b=real(512),
    call=lambda net, a, b: net(a, target=b),
)

SPEECH = "speechbrain.lobes.models"
row(
    "speechbrain",
    "sb_ecapa",
    (
        f"{SPEECH}.ECAPA_TDNN.ECAPA_TDNN",
        {
            "input_size": 16,
            "channels": [16] * 5,
            "lin_neurons": 8,
            "attention_channels": 8,
            "res2net_scale": 4,
            "se_channels": 8,
            "kernel_sizes": [3, 3, 3, 3, 1],
        },
    ),
    a=real(20, 16),
)
row(
    "speechbrain",
    "sb_xvector",
    (f"{SPEECH}.Xvector.Xvector", {"in_channels": 16, "tdnn_channels": [16] * 5, "lin_neurons": 8}),
    a=real(30, 16),
)
row(
    "speechbrain",
    "sb_crdnn",
    (
        f"{SPEECH}.CRDNN.CRDNN",
        {
            "input_size": 16,
            "cnn_blocks": 1,
            "cnn_channels": [4],
            "rnn_layers": 1,
            "rnn_neurons": 8,
            "dnn_blocks": 1,
            "dnn_neurons": 8,
            "time_pooling_size": 2,
        },
    ),
    a=real(12, 16),
)
row(
    "speechbrain",
    "sb_transformer_asr",
    lambda: use(f"{SPEECH}.transformer.TransformerASR.TransformerASR")(
        tgt_vocab=20, input_size=16, d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, d_ffn=32
    ),
    a=real(12, 16),
    b=whole(20, 5),
    call=lambda net, a, b: net(a, b),
)
row(
    "speechbrain",
    "sb_conformer",
    lambda: use(f"{SPEECH}.transformer.Conformer.ConformerEncoder")(
        num_layers=1, d_model=16, d_ffn=32, nhead=2, kernel_size=3, attention_type="regularMHA"
    ),
    a=real(12, 16),
    call=lambda net, a: net(a)[0],
)
row(
    "speechbrain",
    "sb_branchformer",
    lambda: use(f"{SPEECH}.transformer.Branchformer.BranchformerEncoder")(
        num_layers=1, d_model=16, nhead=2, kernel_size=3, attention_type="regularMHA", csgu_linear_units=32
    ),
    a=real(12, 16),
    call=lambda net, a: net(a)[0],
)
row(
    "speechbrain",
    "sb_dual_path",
    lambda: (
        use(f"{SPEECH}.dual_path.Encoder")(kernel_size=4, out_channels=8),
        use(f"{SPEECH}.dual_path.Dual_Path_Model")(
            in_channels=8,
            out_channels=8,
            num_layers=1,
            K=8,
            num_spks=2,
            intra_model=use(f"{SPEECH}.dual_path.SBTransformerBlock")(1, 8, 2, d_ffn=16),
            inter_model=use(f"{SPEECH}.dual_path.SBTransformerBlock")(1, 8, 2, d_ffn=16),
        ),
    ),
    a=real(64),
    call=lambda encoder, masks, a: masks(encoder(a)),
)
row(
    "speechbrain",
    "sb_wav2vec_loss",
    lambda: (use("torch.nn.Linear")(8, 10),),
    a=real(6, 8),
    b=whole(10, 6),
    call=lambda net, a, b: use("speechbrain.nnet.losses.nll_loss")(net(a).log_softmax(-1), b),
)
