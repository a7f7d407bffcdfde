"""Whether to draft at all, by what drafts of late have gained.

What a draft gains scatters: of ten, the mean of a good drafter may be below what they cost. So
drafting goes on while the mean may be worth it, by as much as so few drafts leave in doubt: an
upper confidence bound on what is weighed less the older it is (Garivier & Moulines 2008, arXiv
0805.3415). Then it rests, and what was seen is forgotten: another try begins with nothing known.
Each rest after a try that was in vain is twice as long as the one before. A single row's next text
ends it; what drafts gain for many texts at once, they gain for the next as well.
"""

from math import inf, sqrt

KEEP = 0.99  # what a step counts for, of the one after it
DOUBT = 1.5  # tokens that the gains of single drafts lie apart
LEAST, MOST = 32, 1024  # steps of a rest


class Evidence:
    """What drafts have gained, and rests from them. Of every step: `allows`, then `add` where
    drafts were made."""

    def __init__(self) -> None:
        self.gains = self.drafts = 0.0  # of the last steps: tokens; how many drafts
        self.rest, self.left, self.lasted = LEAST, 0, 0  # steps: of a rest, left of it, since one

    @property
    def bound(self) -> float:
        """Tokens that a draft may gain, with as much doubt as so few leave."""
        if not self.drafts:
            return inf
        return self.gains / self.drafts + DOUBT / sqrt(self.drafts)

    def may(self, price: float) -> bool:
        """Whether `allows` would say so."""
        return not self.left and self.bound > price

    def allows(self, price: float) -> bool:
        """Whether a step should draft, where a draft has to gain so many tokens."""
        if self.left:
            self.left -= 1
            return False
        if self.bound > price:
            self.lasted += 1
            return True
        self.rest = LEAST if self.lasted > self.rest else min(2 * self.rest, MOST)
        self.left, self.lasted, self.gains, self.drafts = self.rest - 1, 0, 0.0, 0.0
        return False

    def wake(self) -> None:
        """End a rest: another text begins, of which the one before it says little."""
        self.rest, self.left = LEAST, 0

    def add(self, gained: float, drafts: int) -> None:
        """Note what a step's drafts have gained, in tokens, what they cost taken off."""
        self.gains = KEEP * self.gains + gained
        self.drafts = KEEP * self.drafts + drafts
