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
