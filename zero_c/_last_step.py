"""What the last step did, read from the engine when somebody asks."""


class LastStep:
    """What the last step did. It follows the optimizer: after the next step it tells of that one.

    On a GPU a step is only enqueued; the first look at `norm` or `nonfinite` waits until it is done.
    """

    def __init__(self, engine, scale, deterministic):
        self._engine = engine
        self._can_skip = self._has_norm = False
        self._known_norm = None
        self.scale = scale  # loss scale that the gradients carried
        self.steps = 0  # that were not skipped, since construction
        self.deterministic = deterministic  # whether sums on GPUs are in one order

    def follow(self, scale, can_skip, has_norm, known_norm):
        """A step was made; known_norm: what was found before it, where it did not look for one itself."""
        self.scale, self._can_skip, self._has_norm, self._known_norm = scale, can_skip, has_norm, known_norm
        self.steps += not self.skipped

    @property
    def norm(self):
        """Of the averaged, unscaled gradient before clipping; None where it was not needed."""
        return self._engine.last_step()[0] if self._has_norm else self._known_norm

    @property
    def skipped(self):
        """Whether nothing was changed, because of an infinity or NaN on some rank."""
        return self._can_skip and self._engine.last_step()[1]

    @property
    def nonfinite(self):
        """How many ranks saw an infinity or NaN."""
        return self._engine.last_step()[2]

    def __repr__(self):
        return (f"LastStep(norm={self.norm}, scale={self.scale}, skipped={self.skipped}, nonfinite={self.nonfinite}, "
                f"steps={self.steps}, deterministic={self.deterministic})")
