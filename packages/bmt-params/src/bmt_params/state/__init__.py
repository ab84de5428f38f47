"""The tensors of a model or an optimizer over all ranks: what checkpoints, optimizers and
statistics share.
"""
