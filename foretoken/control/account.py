"""What speculation has gained and lost against plain decoding, in seconds."""

from __future__ import annotations

from foretoken.control.config import PolicyConfig


class TimeAccount:
    """Keeps what draft tokens, trials and deciding made steps longer against the tokens that draft tokens brought.

    `slack_s` is by how much decoding is ahead of plain decoding, with what it may fall behind. `credit_s` is what
    trials may lose; those that gain pay back.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.slack_s = self.credit_s = 0.0

    @property
    def is_overdrawn(self) -> bool:
        """Whether decoding is behind by more than it may be."""
        return self.slack_s < 0

    @property
    def trial_s(self) -> float:
        """What a trial may lose now."""
        return max(0.0, min(self.credit_s, self.slack_s))

    def settle(self, base_s: float, gained: float, more_s: float, joined: float) -> None:
        """A step that takes `base_s` without a draft took `more_s` longer and brought `gained` tokens more per request;
        a share `joined` of its requests is new.
        """
        config = self.config
        share = config.slack_share + joined * config.first_slack_steps
        slack_s = self.slack_s + (share + gained) * base_s - more_s
        self.slack_s = max(config.min_slack_steps * base_s, min(config.max_slack_steps * base_s, slack_s))
