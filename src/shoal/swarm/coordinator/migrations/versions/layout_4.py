"""Submissions by their node, in order: its speed is measured from one to the next. The index is made where all are."""

revision, down_revision = "4", "3"


def upgrade() -> None:
    """There is no column to add."""
