"""Free volumes that were given to claims by decisions, until the cluster shows it or the decision came to nothing."""

from __future__ import annotations

from hodei.model.volume import Volume


class AssumedVolumes:
    """`version` counts the changes."""

    def __init__(self) -> None:
        self.version = 0
        self._claim_of: dict[str, str] = {}
        self._volume_of: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._claim_of)

    def take(self, volume: str, claim: str) -> None:
        self.release(claim)
        self._claim_of[volume], self._volume_of[claim] = claim, volume
        self.version += 1

    def release(self, claim: str) -> None:
        volume = self._volume_of.pop(claim, None)
        if volume is not None:
            del self._claim_of[volume]
            self.version += 1

    def of(self, claim: str) -> str:
        """The volume that a claim is to have; "" for none."""
        return self._volume_of.get(claim, "")

    def is_free(self, volume: str, claim: str) -> bool:
        """Whether the claim may still have it."""
        return self._claim_of.get(volume, claim) == claim

    def concerns(self, wanted: Volume) -> bool:
        """Whether another claim is to have one of its choices."""
        return any(not self.is_free(choice.name, wanted.handle) for choice in wanted.choices)

    def claims(self) -> dict[str, str]:
        """Each claim with its volume."""
        return dict(self._volume_of)
