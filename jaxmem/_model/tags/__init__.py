"""Tags, and the checkpoint policies that apply a plan's actions to tagged tensors. `tag` names a
tensor (`tag.py`), `remat_policy` makes a policy from a plan (`policy.py`), and the tag's rule under
`jax.checkpoint` stores or recomputes the tensor as the policy answers (`primitive.py`, `hijax.py`).
"""
