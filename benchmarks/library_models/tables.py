"""Models of tables, time series, recommendations and agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from library_models.rows import real, row, unit, use, whole

row(
    "pytorch-tabnet",
    "tabnet",
    lambda: use("pytorch_tabnet.tab_network.TabNet")(
        8, 3, cat_idxs=[], cat_dims=[], cat_emb_dim=[], group_attention_matrix=use("torch.eye")(8)
    ),
    size=8,
    call=lambda net, a: net(a)[0],
    a=real(8),
    target=whole(3),
)
row(
    "tab-transformer-pytorch",
    "ft_lucid",
    (
        "tab_transformer_pytorch.FTTransformer",
        {"categories": (5, 4, 3), "num_continuous": 4, "dim": 16, "dim_out": 1, "depth": 2, "heads": 2, "dim_head": 8},
    ),
    a=whole(3, 3),
    b=real(4),
    target=real(1),
)
row(
    "rtdl-revisiting-models",
    "rtdl_ft",
    (
        "rtdl_revisiting_models.FTTransformer",
        {
            "n_cont_features": 4,
            "cat_cardinalities": [5, 3],
            "d_out": 3,
            "n_blocks": 2,
            "d_block": 16,
            "attention_n_heads": 2,
            "attention_dropout": 0.1,
            "ffn_d_hidden": 32,
            "ffn_d_hidden_multiplier": None,
            "ffn_dropout": 0.1,
            "residual_dropout": 0.0,
        },
    ),
    a=real(4),
    b=whole(3, 2),
    target=whole(3),
)
row(
    "rtdl-revisiting-models",
    "rtdl_resnet",
    (
        "rtdl_revisiting_models.ResNet",
        {
            "d_in": 8,
            "d_out": 3,
            "n_blocks": 2,
            "d_block": 16,
            "d_hidden_multiplier": 2.0,
            "dropout1": 0.1,
            "dropout2": 0.0,
        },
    ),
    size=8,
    a=real(8),
    target=whole(3),
)
row(
    "rtdl-num-embeddings",
    "rtdl_periodic",
    lambda: use("torch.nn.Sequential")(
        use("rtdl_num_embeddings.PeriodicEmbeddings")(8, 6, lite=True),
        use("torch.nn.Flatten")(),
        use("torch.nn.Linear")(48, 3),
    ),
    a=real(8),
    target=whole(3),
)

# what takes numbers of items and fields
FIELDS = 4


def _features() -> Any:
    sparse = use("deepctr_torch.inputs.SparseFeat")
    return [sparse(f"c{i}", vocabulary_size=6, embedding_dim=8) for i in range(FIELDS)]


for name, keywords in {
    "DeepFM": {},
    "DCN": {},
    "xDeepFM": {"cin_layer_size": (8, 8)},
    "AutoInt": {},
    "FiBiNET": {},
    "NFM": {},
    "PNN": None,
    "AFM": {},
    "ONN": {},
    "WDL": {},
}.items():
    made = (
        (lambda name=name: use(f"deepctr_torch.models.{name}")(_features(), dnn_hidden_units=(16, 16)))
        if keywords is None
        else (
            lambda name=name, keywords=keywords: use(f"deepctr_torch.models.{name}")(
                _features(), _features(), **keywords
            )
        )
    )
    row(
        "deepctr-torch",
        f"ctr_{name}",
        made,
        size=8,
        a=lambda n, g: use("torch.randint")(0, 6, (n, FIELDS), generator=g).float(),
        target=unit(1),
    )


def _sparse(count: int) -> Any:
    return [use("torch_rechub.basic.features.SparseFeature")(f"c{i}", vocab_size=6, embed_dim=8) for i in range(count)]


RECHUB = {"mlp_params": {"dims": [16], "dropout": 0.0, "activation": "relu"}}
for name, keywords in {
    "WideDeep": lambda: {"wide_features": _sparse(2), "deep_features": _sparse(3), **RECHUB},
    "DeepFM": lambda: {"deep_features": _sparse(3), "fm_features": _sparse(2), **RECHUB},
    "DCNv2": lambda: {"features": _sparse(3), "n_cross_layers": 2, **RECHUB},
}.items():
    row(
        "torch-rechub",
        f"rechub_{name}",
        lambda name=name, keywords=keywords: use(f"torch_rechub.models.ranking.{name}")(**keywords()),
        size=8,
        c0=whole(6),
        c1=whole(6),
        c2=whole(6),
        target=unit(),
        call=lambda net, **batch: net(batch),
    )

SERIES = {
    "num_variates": 6,
    "lookback_len": 16,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "dim_head": 8,
    "pred_length": 4,
    "flash_attn": False,
}
row("iTransformer", "itransformer", ("iTransformer.iTransformer", SERIES), a=real(16, 6), b=real(4, 6))
row(
    "iTransformer",
    "itransformer_norm",
    ("iTransformer.iTransformer", {**SERIES, "use_reversible_instance_norm": True}),
    a=real(16, 6),
    b=real(4, 6),
)
row("pytorch-tcn", "tcn", ("pytorch_tcn.TCN", {"num_inputs": 6, "num_channels": [8, 8]}), a=real(6, 16))
FORECAST: Mapping[str, Mapping[str, Any]] = {
    "NHITS": {"mlp_units": [[16, 16]] * 3},
    "NBEATSx": {"mlp_units": [[16, 16]] * 3, "n_harmonics": 1, "n_polynomials": 1},
    "PatchTST": {"hidden_size": 16, "n_heads": 2, "encoder_layers": 1, "patch_len": 4, "stride": 2},
    "DLinear": {},
    "NLinear": {},
    "TFT": {"hidden_size": 8, "n_head": 2},
    "LSTM": {"encoder_hidden_size": 8},
    "GRU": {"encoder_hidden_size": 8},
    "TCN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "TimesNet": {"hidden_size": 8, "conv_hidden_size": 8, "encoder_layers": 1},
    "TiDE": {"hidden_size": 8, "decoder_output_dim": 4},
    "DeepAR": {"lstm_hidden_size": 8},
    "VanillaTransformer": {"hidden_size": 16, "n_head": 2, "encoder_layers": 1, "conv_hidden_size": 8},
    "Informer": {"hidden_size": 16, "n_head": 2, "encoder_layers": 2, "conv_hidden_size": 8},
    "Autoformer": {"hidden_size": 16, "n_head": 2, "encoder_layers": 1, "conv_hidden_size": 8},
    "FEDformer": {"hidden_size": 16, "n_head": 8, "encoder_layers": 1, "conv_hidden_size": 8, "modes": 4},
    "TSMixer": {"n_series": 1, "ff_dim": 8},
    "MLP": {"hidden_size": 16},
    "KAN": {"hidden_size": 8},
    "BiTCN": {"hidden_size": 8},
    "StemGNN": {"n_series": 2},
    "SOFTS": {"n_series": 2, "hidden_size": 16},
    "TimeMixer": {"n_series": 1, "d_model": 8, "d_ff": 8},
}
for name, keywords in FORECAST.items():
    row(
        "neuralforecast",
        f"nf_{name}",
        (f"neuralforecast.models.{name}", {"h": 4, "input_size": 16, "max_steps": 1, **keywords}),
        insample_y=real(16, keywords.get("n_series", 1)),
        call=lambda net, insample_y: net(
            {
                "insample_y": insample_y,
                "insample_mask": use("torch.ones_like")(insample_y),
                "futr_exog": None,
                "hist_exog": None,
                "stat_exog": None,
            }
        ),
    )


def _policy(kind: str, box: Any, actions: Any) -> Any:
    return use(kind)(box, actions, lambda left: 1e-3)


def _ppo(net: Any, seen: Any, done: Any, before: Any, gained: Any) -> Any:
    values, chance, entropy = net.evaluate_actions(seen, done)
    ratio = (chance - before).exp()
    kept = use("torch.min")(ratio * gained, ratio.clamp(0.8, 1.2) * gained)
    return -kept.mean() + 0.5 * (values[:, 0] - gained).square().mean() - 0.01 * entropy.mean()


POLICIES = "stable_baselines3.common.policies"
row(
    "stable-baselines3",
    "sb3_ppo",
    lambda: _policy(
        f"{POLICIES}.ActorCriticPolicy", use("gymnasium.spaces.Box")(-1, 1, (6,)), use("gymnasium.spaces.Discrete")(4)
    ),
    size=8,
    a=real(6),
    b=whole(4),
    c=real(),
    d=real(),
    call=_ppo,
)
row(
    "stable-baselines3",
    "sb3_ppo_box",
    lambda: _policy(
        f"{POLICIES}.ActorCriticPolicy",
        use("gymnasium.spaces.Box")(-1, 1, (6,)),
        use("gymnasium.spaces.Box")(-1, 1, (2,)),
    ),
    size=8,
    a=real(6),
    b=real(2),
    c=real(),
    d=real(),
    call=_ppo,
)
row(
    "stable-baselines3",
    "sb3_dqn_cnn",
    lambda: _policy(
        "stable_baselines3.dqn.policies.CnnPolicy",
        use("gymnasium.spaces.Box")(0, 255, (4, 36, 36), dtype=use("numpy.uint8")),
        use("gymnasium.spaces.Discrete")(4),
    ),
    a=lambda n, g: use("torch.randint")(0, 255, (n, 4, 36, 36), generator=g),
    b=whole(4),
    c=real(),
    call=lambda net, a, b, c: use("torch.nn.functional.smooth_l1_loss")(net.q_net(a).gather(1, b[:, None])[:, 0], c),
)


def _sac(net: Any, seen: Any) -> Any:
    actions, chance = net.actor.action_log_prob(seen)
    return (0.1 * chance - use("torch.min")(*net.critic(seen, actions))).mean()


row(
    "stable-baselines3",
    "sb3_sac",
    lambda: _policy(
        "stable_baselines3.sac.policies.SACPolicy",
        use("gymnasium.spaces.Box")(-1, 1, (6,)),
        use("gymnasium.spaces.Box")(-1, 1, (2,)),
    ),
    size=8,
    a=real(6),
    call=_sac,
)
row(
    "pytorch-forecasting",
    "pf_nbeats",
    lambda: use("pytorch_forecasting.models.nbeats.sub_modules.NBEATSGenericBlock")(
        units=16, thetas_dim=4, num_block_layers=2, backcast_length=16, forecast_length=4
    ),
    a=real(16),
)
row(
    "pytorch-forecasting",
    "pf_grn",
    lambda: use("pytorch_forecasting.models.temporal_fusion_transformer.sub_modules.GatedResidualNetwork")(
        8, 16, 8, 0.1
    ),
    a=real(6, 8),
    target=real(6, 8),
)
row(
    "pytorch-forecasting",
    "pf_attention",
    lambda: use("pytorch_forecasting.models.temporal_fusion_transformer.sub_modules.InterpretableMultiHeadAttention")(
        n_head=2, d_model=8
    ),
    a=real(6, 8),
    call=lambda net, a: net(a, a, a)[0],
)
