"""Click sequences `<video>` or `<video>_<column>`: two aligned lists, or a reason."""

from __future__ import annotations

from tests.etl.sources.inputs import INT, declare, outcomes, read

CLICKS = {
    "name": "videos",
    "type": "list<int64>",
    "separator": " ",
    "pair": {"name": "channels", "default": -1},
}


def test_sequences_give_two_aligned_lists(spark, tmp_path):
    lines = ["1\t12_3 7 12_4", "2\t5", "3\t12__3", "4\t_7", "5\t", "6\t12_3  7", "7\t12_"]
    lines += ["8\t1_2_3", "9\tx_1", "10\t1_x", "11\t12_3 ", "12\t_", "13\t9223372036854775808_1"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    source = read(spark, tmp_path, declare(INT, CLICKS))
    assert outcomes(source) == [
        (1, [12, 7, 12], [3, -1, 4]),
        (2, [5], [-1]),
        "malformed_entry:videos",
        "missing_value:videos",
        "null:videos",
        "empty_entry:videos",
        "malformed_entry:videos",
        "malformed_entry:videos",
        "not_list<int64>:videos",
        "not_list<int64>:channels",
        "empty_entry:videos",
        "missing_value:videos",
        "not_list<int64>:videos",
    ]


def test_one_click_gives_two_columns_and_its_name_is_free(spark, tmp_path):
    pair = {"name": "channel", "type": "string", "separator": "::", "default": "none"}
    video = {"name": "video", "type": "string", "pair": pair, "nullable": True}
    (tmp_path / "in").write_text("1\tv_1::news\n2\tv_2\n3\t\n4\tv::\n5\t::news\n")
    config = declare(INT, video)
    assert config.column_types == {"id": "int64", "video": "string", "channel": "string"}
    assert outcomes(read(spark, tmp_path, config)) == [
        (1, "v_1", "news"),
        (2, "v_2", "none"),
        (3, None, None),
        "malformed_entry:video",
        "missing_value:video",
    ]


def test_sequences_inside_json(spark, tmp_path):
    clicks = {**CLICKS, "separator": None}
    lines = ['{"id": 1, "videos": ["12_3", "7", 8]}', '{"id": 2, "videos": ["12_3", ""]}']
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    source = read(spark, tmp_path, declare(INT, clicks, format="json"))
    assert outcomes(source) == [(1, [12, 7, 8], [3, -1, -1]), "empty_entry:videos"]
