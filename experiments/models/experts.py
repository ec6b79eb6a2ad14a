"""A mixture of experts: several MLPs. A router selects some MLPs for each token (Shazeer et al.,
2017).

Each expert computes all tokens, and gates of zero drop the results that no token selected. So no
expert has a capacity, and no token is dropped. A layer has `experts` times the products of one
MLP. The alternative, to sort the tokens by their experts, has fewer products, but its shapes or its
kernels depend on the routing. The router has no tag: the backward computes the router again, from
the layer norm before it. If a plan compresses the norm, the backward may decide near ties
otherwise.

Shapes: B batch, S sequence, D width, F features, E experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxmem
from experiments.config.models import Model
from experiments.models.sharding import constrain


class Experts(nnx.Module):
    """The MLPs of one layer, and their router. `make(shape, scale)` draws a parameter."""

    def __init__(self, model: Model, make, activation, depth_scale: float):
        E, D, F = model.experts, model.width, 4 * model.width
        self.model, self.activation = model, activation
        self.router = nnx.Param(make((D, E), 1.0))
        self.up, self.up_bias = nnx.Param(make((E, D, F), 1.0)), nnx.Param(make((E, F), 0.0))
        self.down = nnx.Param(make((E, F, D), depth_scale))
        self.down_bias = nnx.Param(make((E, D), 0.0))

    def __call__(self, x_BSD):
        model, tag, dtype = self.model, jaxmem.tag, x_BSD.dtype
        wide = self.router[...].dtype
        probs_BSE = jax.nn.softmax(x_BSD.astype(wide) @ self.router[...])
        chosen_BSE = selected(probs_BSE, model.experts_per_token)
        gates_BSE = jnp.where(chosen_BSE, probs_BSE, 0)
        gates_BSE = (gates_BSE / gates_BSE.sum(-1, keepdims=True)).astype(dtype)
        up_EDF, down_EFD = self.up[...].astype(dtype), self.down[...].astype(dtype)
        biases = self.up_bias[...].astype(dtype), self.down_bias[...].astype(dtype)
        u_EBSF = jnp.einsum("bsd,edf->ebsf", constrain(x_BSD, "all_BSD"), up_EDF)
        u_EBSF = constrain(u_EBSF + biases[0][:, None, None], "experts_EBSF")
        g_EBSF = self.activation(tag(u_EBSF, "up", kind="linear"))
        g_EBSF = tag(g_EBSF, model.activation, kind="gelu")
        gated_EBSF = g_EBSF * jnp.moveaxis(gates_BSE, -1, 0)[..., None]
        y_BSD = jnp.einsum("ebsf,efd->bsd", gated_EBSF, down_EFD) + gates_BSE @ biases[1]
        return with_loss(y_BSD, model.balance * imbalance(probs_BSE, chosen_BSE))


def selected(probs_BSE, count: int):
    """Returns True for the `count` likeliest experts of each token, bool (B, S, E)."""
    _, likeliest_BSK = jax.lax.top_k(probs_BSE, count)
    return (likeliest_BSK[..., None] == jnp.arange(probs_BSE.shape[-1])).any(-2)


def imbalance(probs_BSE, chosen_BSE):
    """Returns the load-balancing loss of the Switch Transformer (Fedus et al., 2021, equation 4):
    E times the sum over experts of the share of tokens times the mean probability; 1 if the loads
    are equal.
    """
    share_E = chosen_BSE.mean((0, 1), dtype=probs_BSE.dtype) / chosen_BSE.sum(-1).mean(
        dtype=probs_BSE.dtype
    )
    return len(share_E) * (share_E * probs_BSE.mean((0, 1))).sum()


@jax.custom_vjp
def with_loss(x, loss):
    """Returns `x`. The backward adds the gradient of `loss`, a scalar, to the gradient of the
    model's loss, as if the model's loss contained it. So a layer returns nothing but its output.
    """
    return x


with_loss.defvjp(
    lambda x, loss: (x, jnp.zeros_like(loss)), lambda zero, d_x: (d_x, jnp.ones_like(zero))
)
