"""What was put away lately: found by its name, until it is forgotten or too much has come since."""

from shoal.swarm.coordinator.store.recent import MOST, Recent


def test_the_oldest_is_forgotten_first() -> None:
    recent: Recent[int] = Recent()
    for number in range(MOST + 2):
        recent.put(str(number), number)
    assert [recent.get(name) for name in ("0", "1", "2", str(MOST + 1))] == [None, None, 2, MOST + 1]
    recent.forget("2")
    recent.forget("never there")
    assert recent.get("2") is None
