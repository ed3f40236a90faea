"""An input, read as a sequence of choices; what is missing at its end reads as zeros. Targets in Python make of them
what they feed: JSON documents with something wrong in them, texts, numbers.
"""

ODD = [None, True, False, 0, -1, 1, 2, 7, 8, 31, 32, 64, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -2**63, 10**30,
       10**400, 0.0, -0.0, 0.5, 1.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), "", "x", "0", "../x", "a" * 300,
       "\u00e9\u4e2d" * 20, "\ud800", "\x00\n\x1b[31m", "float32", [], {}, [0], [[]], [None, None, None], {"a": 1}]
DEEP = 900  # less than what Python's own limit lets json write


class Choices:
    def __init__(self, data):
        self._data, self._at = data, 0

    @property
    def left(self):
        return len(self._data) - self._at

    def byte(self):
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, end):
        """A number below `end`, of up to 65536."""
        return (self.byte() if end <= 256 else self.byte() * 256 + self.byte()) % end

    def pick(self, values):
        return values[self.below(len(values))]

    def bytes(self, most):
        count = min(self.below(most + 1), self.left)
        self._at += count
        return bytes(self._data[self._at - count:self._at])

    def text(self, most=40):
        """Any bytes as Python has them in names of files and variables."""
        return self.bytes(most).decode(errors="surrogateescape")

    def odd(self):
        """A JSON value that is probably wrong where it is put."""
        what = self.below(len(ODD) + 4)
        if what < len(ODD):
            return ODD[what]
        if what == len(ODD):
            return self.byte() - 128
        if what == len(ODD) + 1:
            return self.text(20)
        deep = 0
        for _ in range(self.below(DEEP)):
            deep = [deep] if what % 2 else {"a": deep}
        return deep

    def edited(self, value, most=4):
        """A JSON value like this one, of which up to `most` places are others."""
        for _ in range(self.below(most + 1)):
            value = self._edited(value)
        return value

    def _edited(self, value):
        what = self.below(16)
        if isinstance(value, dict) and value and what < 13:
            key = self.pick(sorted(value, key=str))
            if what == 0:
                return {k: v for k, v in value.items() if k != key}
            if what == 1:
                return {**value, (self.pick(list(value)) if self.below(2) else self.text(8)): self.odd()}
            return {**value, key: self._edited(value[key])}
        if isinstance(value, list) and value and what < 13:
            at = self.below(len(value))
            if what == 0:
                return value[:at] + value[at + 1:]
            if what == 1:
                return value[:at] + [value[at]] * 2 + value[at + 1:]
            return value[:at] + [self._edited(value[at])] + value[at + 1:]
        if isinstance(value, int) and what < 8:
            return value + self.pick([-1, 1, 8, 64, -value, -2 * value, value, 2**32])
        if isinstance(value, str) and what < 8:
            at = self.below(len(value) + 1)
            return value[:at] + self.text(4) + value[at + self.below(3):]
        return self.odd()
