"""The work list of the attention kernel."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.engine.attention_plan import AttentionPlan, TileSize, split_table


@given(
    st.dictionaries(st.integers(0, 11), st.tuples(st.integers(0, 3), st.booleans()), max_size=12),
    st.lists(st.integers(1, 70), min_size=4, max_size=4),
)
def test_every_row_attends_to_each_position_of_its_prompt_once(
    rows: dict[int, tuple[int, bool]], lengths: list[int]
) -> None:
    plan = AttentionPlan(12, 70, TileSize(rows=3, positions=16))
    assert plan.table_if_changed() is None
    places = [place for place, _ in rows.values()]
    blocks = [[10 * place + at for at in range(-(-lengths[place] // 16))] for place in places]
    plan.add_rows(rows, places, [lengths[place] for place in places], blocks)
    plan.remove_rows(removed := [slot for slot, (_, is_removed) in rows.items() if is_removed])
    table = plan.table_if_changed()
    assert table is not None
    assert plan.table_if_changed() is None
    num_items, order, items = split_table(table, 12)
    items = items[:, : num_items[0]]
    seen = sorted(
        (int(slot), int(block), int(position))
        for first_row, num_rows, block, first, num in items.T
        for slot in order[first_row : first_row + num_rows]
        for position in range(first, first + num)
    )
    assert seen == sorted(
        (slot, 10 * place + position // 16, position)
        for slot, (place, _) in rows.items()
        if slot not in removed
        for position in range(lengths[place])
    )
    assert all(num_rows <= 3 and num <= 16 and first % 16 == 0 for _, num_rows, _, first, num in items.T)
