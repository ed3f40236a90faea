"""What the last step did, read from the engine when somebody asks."""


class LastStep:
    """What the last step did. It follows the optimizer: after the next step it tells of that one.

    On a GPU a step is only enqueued; the first look at `norm` or `nonfinite` waits until it is done. Once a step was captured
    into a CUDA graph, replays are steps, too, and every look waits for those that were launched before.
    """

    def __init__(self, engine, scale, deterministic, before_look=lambda: None):
        self._engine, self._before_look = engine, before_look  # called before the GPU is asked
        self._can_skip = self._has_norm = False
        self._known_norm = None
        self.scale = scale  # loss scale that the gradients carried
        self._steps = 0  # without those that replays have made
        self.deterministic = deterministic  # whether sums on GPUs are in one order

    def follow(self, scale, can_skip, has_norm, known_norm):
        """A step was made, or captured; known_norm: what was found before it, where it did not look for one itself."""
        self.scale, self._can_skip, self._has_norm, self._known_norm = scale, can_skip, has_norm, known_norm
        if not self._engine.capturing:
            self._steps += not self.skipped

    def _look(self):
        self._before_look()
        return self._engine.last_step()

    @property
    def steps(self):
        """How many were not skipped, since construction."""
        if not self._engine.captured:
            return self._steps
        self._before_look()
        return self._steps + self._engine.replayed_steps()

    @steps.setter
    def steps(self, value):
        self._steps += value - self.steps

    @property
    def norm(self):
        """Of the averaged, unscaled gradient before clipping; None where it was not needed."""
        return self._look()[0] if self._has_norm else self._known_norm

    @property
    def skipped(self):
        """Whether nothing was changed, because of an infinity or NaN on some rank."""
        return self._can_skip and self._look()[1]

    @property
    def nonfinite(self):
        """How many ranks saw an infinity or NaN."""
        return self._look()[2]

    def __repr__(self):
        return (f"LastStep(norm={self.norm}, scale={self.scale}, skipped={self.skipped}, nonfinite={self.nonfinite}, "
                f"steps={self.steps}, deterministic={self.deterministic})")
