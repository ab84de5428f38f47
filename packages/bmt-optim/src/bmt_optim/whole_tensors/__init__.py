"""Optimizers that need whole tensors, for parameters of which every rank has a part: see
:func:`bmt_optim.whole`.
"""
