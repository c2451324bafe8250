import pytest

from dpengine.report.history_rows import public_text, public_values


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/alice/data/train.csv", "train.csv"),
        ("/home/alice smith/train.csv", "train.csv"),
        ("/data.csv", "data.csv"),
        ("~/data/train.csv", "train.csv"),
        ("C:\\Users\\alice\\train.csv", "train.csv"),
        ("\\\\server\\alice\\train.csv", "train.csv"),
        ("file:///home/alice/train.csv", "train.csv"),
        ("read from /home/alice/train.csv on Monday", "read from train.csv on Monday"),
        ("(/home/alice/train.csv)", "(train.csv)"),
    ],
)
def test_absolute_paths_lose_their_folders(text, public):
    assert public_text(text) == public


@pytest.mark.parametrize(
    "text",
    [
        "UCI Machine Learning Repository, doi:10.24432/C5XW20",
        "https://archive.example.org/dataset/2/adult",
        "CC BY 4.0 and/or MIT",
        "data/train.csv",
        "../data/train.csv",
        "ε / δ",
    ],
)
def test_what_is_no_absolute_path_stays(text):
    assert public_text(text) == text


def test_a_text_is_one_line_of_bounded_length():
    assert public_text("a\nb\t\x1b[31mc\x00") == "a b [31mc"
    assert len(public_text("x" * 10_000)) == 500


def test_nested_values_are_cleaned_and_numbers_stay():
    value = {"/home/alice/a": [1, 2.5, True, None, "/home/alice/b"], "c": {"d": ("/e/f",)}}
    assert public_values(value) == {"a": [1, 2.5, True, None, "b"], "c": {"d": ["f"]}}
