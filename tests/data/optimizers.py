"""Optimizers as users write them: elementwise, with a norm of the parameter, of each row, and of all parameters."""

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Elementwise: the sign of a mean of gradients."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = momentum.mul(first).add(p.grad, alpha=1 - first).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


class LAMB(Optimizer):
    """Adam's step, as long as the parameter is: norms of both."""

    def __init__(self, params, lr=1e-3, eps=1e-6):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["mean"] / (state["square"].sqrt() + group["eps"])
                p.add_(update * (p.norm() / (update.norm() + group["eps"])), alpha=-group["lr"])


class RowNorm(Optimizer):
    """One second moment for each row of a matrix, so that rows are apart and columns are not."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("square", torch.zeros(p.shape[0], dtype=p.dtype))
                square.mul_(0.9).add_(p.grad.pow(2).mean(1), alpha=0.1)
                p.add_(p.grad / (square.sqrt() + 1e-6).unsqueeze(1), alpha=-group["lr"])


class AfterTheFirst(Optimizer):
    """Divides every gradient but the first by what the first one's norm makes of it."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, *_ = group["params"]
            for p in group["params"]:
                scale = 1.0 if p is first else 1.0 / (1.0 + first.grad.norm())
                p.add_(p.grad * scale, alpha=-group["lr"])


class Clipped(Optimizer):
    """Divides every gradient by the norm of all."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["norm"] = norm
                p.add_(p.grad / norm, alpha=-group["lr"])


class Late(Optimizer):
    """Elementwise for ten steps; then it takes the mean away."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.sub_(p.grad - p.grad.mean() if steps > 10 else p.grad, alpha=group["lr"])


class _Scaled(Optimizer):
    """SGD with a factor for each gradient, and a count of the steps."""

    def __init__(self, params, lr=1e-2, **more):
        super().__init__(params, {"lr": lr, **more})

    def factor(self, p, group):
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.add_(p.grad * self.factor(p, group), alpha=-group["lr"])


class NormAfterWarmup(_Scaled):
    """Elementwise for a warm-up, longer than other tests run; then with the norms of parameter and gradient."""

    def __init__(self, params, lr=1e-2, warmup=20):
        super().__init__(params, lr, warmup=warmup)

    def factor(self, p, group):
        return p.norm() / p.grad.norm() if self.state[p]["steps"] > group["warmup"] else 1.0


class CountsInGroup(_Scaled):
    """Counts steps for each group."""

    def __init__(self, params, lr=1e-2, warmup=20):
        super().__init__(params, lr, warmup=warmup, count=0)

    def factor(self, p, group):
        group["count"] += 1
        return p.norm() / p.grad.norm() if group["count"] > group["warmup"] else 1.0


class CountsInTensor(_Scaled):
    """Counts steps in a tensor, as torch does."""

    def __init__(self, params, lr=1e-2, warmup=20):
        super().__init__(params, lr, warmup=warmup)

    def factor(self, p, group):
        count = self.state[p].setdefault("count", torch.tensor(0.0))
        count += 1
        return p.norm() / p.grad.norm() if count.item() > group["warmup"] else 1.0


class HiddenWarmup(_Scaled):
    """The same, and no number in its code tells of it."""

    def factor(self, p, group):
        return p.norm() / p.grad.norm() if self.state[p]["steps"] > int("5000") else 1.0


class LinearWarmup(_Scaled):
    """Elementwise, with another step size after 20 steps."""

    def factor(self, p, group):
        return self.state[p]["steps"] / 20 if self.state[p]["steps"] < 20 else 1.0


class CountsItself(Optimizer):
    """Counts its steps in an attribute, and takes the mean away after 20."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad - p.grad.mean() if self.count > 20 else p.grad, alpha=group["lr"])


class ClipsNorm(Optimizer):
    """Clips the gradient of each parameter to a norm of 100."""

    def __init__(self, params, lr=1e-2, most=100.0):
        super().__init__(params, {"lr": lr, "most": most})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * torch.clamp(group["most"] / (p.grad.norm() + 1e-6), max=1.0), alpha=-group["lr"])


class ClipsElements(Optimizer):
    """Clips each element of a gradient: elementwise."""

    def __init__(self, params, lr=1e-2, most=100.0):
        super().__init__(params, {"lr": lr, "most": most})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.clamp(-group["most"], group["most"]), alpha=-group["lr"])


class FactoredWhereLarge(Optimizer):
    """Means of rows and columns of matrices with at least 128 of both; elementwise elsewhere."""

    def __init__(self, params, lr=1e-2, least=128):
        super().__init__(params, {"lr": lr, "least": least})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("square", torch.zeros_like(p))
                new = p.grad**2
                if p.ndim == 2 and min(p.shape) >= group["least"]:
                    new = new.mean(1, keepdim=True) * new.mean(0, keepdim=True) / new.mean()
                square.mul_(0.9).add_(new, alpha=0.1)
                p.add_(p.grad / (square.sqrt() + 1e-8), alpha=-group["lr"])
