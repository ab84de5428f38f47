"""What a correct program never needs: refusals of calls that would treat a part as the whole,
trials of optimizers, and comparisons of what ranks must have in common.
"""
