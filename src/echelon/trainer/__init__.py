"""Where the parts of a run meet: the loop, the step, evaluation, saving."""
