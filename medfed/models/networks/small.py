"""Small networks by the names that configurations give them: :mod:`medfed.standalone.small`."""

from medfed.standalone.small import LinearRegression, LogisticRegression, SmallCNN

__all__ = ["LinearRegression", "LogisticRegression", "SmallCNN"]
