"""Models of graphs, physics and chemistry, flows, differential equations and Gaussian processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from library_models.rows import fixed, real, row, unit, use, whole

EDGES = fixed(lambda g: use("torch.randint")(0, 12, (2, 40), generator=g))
for name in ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN", "PNA"):
    more = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": None} if name == "PNA" else {}

    def _graph(name: str = name, more: Mapping[str, Any] = more) -> Any:
        settings = {**more, "deg": use("torch.tensor")([0, 4, 4, 4])} if more else {}
        return use(f"torch_geometric.nn.{name}")(8, 16, 2, 4, **settings)

    row("torch-geometric", f"pyg_{name}", _graph, size=12, a=real(8), b=EDGES, target=whole(4))
CONVS: Mapping[str, Mapping[str, Any]] = {
    "TransformerConv": {},
    "GATv2Conv": {"add_self_loops": False},
    "ARMAConv": {},
    "TAGConv": {"normalize": False},
    "SGConv": {"add_self_loops": False},
    "LEConv": {},
    "GraphConv": {},
    "ResGatedGraphConv": {},
    "ClusterGCNConv": {},
}
for name, keywords in CONVS.items():
    row(
        "torch-geometric",
        f"pyg_{name}",
        (f"torch_geometric.nn.{name}", {"in_channels": 8, "out_channels": 4, **keywords}),
        size=12,
        a=real(8),
        b=EDGES,
        target=whole(4),
    )
row(
    "torch-geometric",
    "pyg_DenseGCN",
    ("torch_geometric.nn.DenseGCNConv", {"in_channels": 8, "out_channels": 4}),
    a=real(6, 8),
    b=unit(6, 6),
)
row(
    "torch-geometric",
    "pyg_schnet",
    lambda: use("torch_geometric.nn.models.schnet.InteractionBlock")(16, 8, 8, 5.0),
    size=12,
    a=real(16),
    b=EDGES,
    c=fixed(lambda g: use("torch.rand")(40, generator=g)),
    d=fixed(lambda g: use("torch.randn")(40, 8, generator=g)),
)
row(
    "egnn-pytorch",
    "egnn",
    ("egnn_pytorch.EGNN_Network", {"depth": 2, "dim": 16, "num_tokens": 10}),
    a=whole(10, 6),
    b=real(6, 3),
)
row(
    "En-transformer",
    "en_transformer",
    ("en_transformer.EnTransformer", {"depth": 1, "dim": 16, "dim_head": 32, "heads": 2}),
    feats=real(6, 16),
    coors=real(6, 3),
)
row(
    "se3-transformer-pytorch",
    "se3",
    ("se3_transformer_pytorch.SE3Transformer", {"dim": 8, "heads": 2, "depth": 1, "dim_head": 4, "num_degrees": 2}),
    a=real(6, 8),
    b=real(6, 3),
    call=lambda net, a, b: net(a, b, return_type=0),
)
row("e3nn", "e3nn_linear", lambda: use("e3nn.o3.Linear")("4x0e+2x1o", "3x0e+2x1o"), a=real(10))
row(
    "e3nn",
    "e3nn_tensor_product",
    lambda: use("e3nn.o3.FullyConnectedTensorProduct")("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o"),
    a=real(5),
    b=real(4),
)
row(
    "e3nn",
    "e3nn_gate",
    lambda: (
        use("torch.nn.Linear")(6, 3),
        use("e3nn.o3.FullyConnectedTensorProduct")("1x0e", "1x0e+1x1o+1x2e", "2x0e+1x1o"),
    ),
    a=real(6),
    b=real(3),
    call=lambda net, product, a, b: product(
        net(a)[:, :1], use("e3nn.o3.spherical_harmonics")("1x0e+1x1o+1x2e", b, normalize=True)
    ),
)
row(
    "neuraloperator",
    "fno",
    (
        "neuralop.models.FNO",
        {"n_modes": (4, 4), "in_channels": 1, "out_channels": 1, "hidden_channels": 8, "n_layers": 2},
    ),
    a=real(1, 16, 16),
    target=real(1, 16, 16),
)
row(
    "neuraloperator",
    "tfno",
    (
        "neuralop.models.TFNO",
        {"n_modes": (4, 4), "in_channels": 1, "out_channels": 1, "hidden_channels": 8, "n_layers": 2, "rank": 0.5},
    ),
    a=real(1, 16, 16),
    target=real(1, 16, 16),
)
row(
    "neuraloperator",
    "uno",
    (
        "neuralop.models.UNO",
        {
            "in_channels": 1,
            "out_channels": 1,
            "hidden_channels": 8,
            "n_layers": 3,
            "uno_out_channels": [8, 8, 8],
            "uno_n_modes": [[4, 4]] * 3,
            "channel_mlp_skip": "linear",
            "uno_scalings": [[0.5, 0.5], [1, 1], [2, 2]],
            "lifting_channels": 8,
            "projection_channels": 8,
        },
    ),
    a=real(1, 16, 16),
    target=real(1, 16, 16),
)
row(
    "neuraloperator",
    "fno_loss",
    lambda: (use("neuralop.models.FNO")(n_modes=(4,), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2),),
    a=real(1, 16),
    b=real(1, 16),
    call=lambda net, a, b: use("neuralop.losses.LpLoss")(d=1, p=2)(net(a), b),
)


def _field() -> Any:
    return use("torch.nn.Sequential")(
        use("torch.nn.Linear")(4, 16), use("torch.nn.Tanh")(), use("torch.nn.Linear")(16, 4)
    )


for name in ("rk4", "midpoint", "euler"):
    row(
        "torchdiffeq",
        f"ode_{name}",
        _field,
        a=real(4),
        target=real(4),
        call=lambda net, a, name=name: use("torchdiffeq.odeint")(
            lambda t, y: net(y), a, use("torch.linspace")(0.0, 1.0, 4), method=name
        )[-1],
    )
row(
    "torchdiffeq",
    "ode_adaptive",
    _field,
    a=real(4),
    target=real(4),
    call=lambda net, a: use("torchdiffeq.odeint")(
        lambda t, y: net(y), a, use("torch.tensor")([0.0, 1.0]), method="dopri5"
    )[-1],
)
row(
    "torchdiffeq",
    "ode_adjoint",
    _field,
    a=real(4),
    target=real(4),
    call=lambda net, a: use("torchdiffeq.odeint_adjoint")(
        lambda t, y: net(y), a, use("torch.linspace")(0.0, 1.0, 3), method="rk4", adjoint_params=tuple(net.parameters())
    )[-1],
)
row(
    "nflows",
    "maf",
    (
        "nflows.flows.MaskedAutoregressiveFlow",
        {"features": 6, "hidden_features": 16, "num_layers": 2, "num_blocks_per_layer": 1},
    ),
    size=8,
    a=real(6),
    call=lambda net, a: -net.log_prob(a).mean(),
)
row(
    "nflows",
    "realnvp",
    ("nflows.flows.SimpleRealNVP", {"features": 6, "hidden_features": 16, "num_layers": 2, "num_blocks_per_layer": 1}),
    size=8,
    a=real(6),
    call=lambda net, a: -net.log_prob(a).mean(),
)
for name in ("NSF", "MAF", "NICE", "GF", "UNAF", "CNF", "NCSF", "SOSPF"):
    row(
        "zuko",
        f"zuko_{name}",
        (
            f"zuko.flows.{name}",
            {"features": 4, "context": 3, "hidden_features": (16, 16)}
            if name != "GF"
            else {"features": 4, "context": 3},
        ),
        size=8,
        a=unit(4),
        b=real(3),
        call=lambda net, a, b: -net(b).log_prob(a).mean(),
    )


def _flow(kind: str) -> Any:
    flows = "normflows.flows"
    if kind == "realnvp":
        steps = [
            use(f"{flows}.AffineCouplingBlock")(use("normflows.nets.MLP")([2, 16, 4], init_zeros=True))
            for _ in range(2)
        ]
        steps.insert(1, use(f"{flows}.Permute")(4, mode="swap"))
    else:
        steps = [use(f"{flows}.AutoregressiveRationalQuadraticSpline")(4, 1, 16), use(f"{flows}.LULinearPermute")(4)]
    return use("normflows.NormalizingFlow")(use("normflows.distributions.DiagGaussian")(4), steps)


for name in ("realnvp", "spline"):
    row(
        "normflows",
        f"normflows_{name}",
        lambda name=name: _flow(name),
        size=8,
        a=real(4),
        call=lambda net, a: net.forward_kld(a),
    )


def _matched(net: Any, start: Any, end: Any, t: Any) -> Any:
    path = use("flow_matching.path.CondOTProbPath")().sample(t=t, x_0=start, x_1=end)
    return (net(use("torch.cat")([path.x_t, t[:, None]], 1)) - path.dx_t).square().mean()


row(
    "flow-matching",
    "flow_matching",
    lambda: use("torch.nn.Linear")(5, 4),
    size=8,
    a=real(4),
    b=real(4),
    c=unit(),
    call=_matched,
)


def _process() -> Any:
    gp = use("gpytorch.kernels.ScaleKernel")(use("gpytorch.kernels.RBFKernel")())
    return gp, use("torch.nn.Linear")(3, 2)


row("gpytorch", "gp_kernel", _process, size=8, a=real(3), call=lambda kernel, net, a: kernel(net(a)).to_dense())


def _enformer() -> Any:
    config = use("enformer_pytorch.EnformerConfig")(
        dim=48, depth=1, heads=4, output_heads={"human": 4}, target_length=2, num_downsamples=4, dim_divisible_by=4
    )
    return use("enformer_pytorch.Enformer")(config)


row("enformer-pytorch", "enformer", _enformer, size=2, a=real(64, 4), call=lambda net, a: net(a)["human"])
