"""GLUE's files, each task's as it is laid out: what is read of them, what is refused, what a BERT
is given of it.
"""

import re

import numpy as np
import pytest

from experiments.config.glue_tasks import TASKS
from experiments.data import glue as glue_data
from experiments.data import tokens as glue_text
from experiments.data.tokens import CLS, PAD, SEP
from experiments.errors import InputError
from experiments.running.glue_metrics import measure

MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse"
    "\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2"
)
PARSED = "0\t1\t1n\tfic\t(\t(\t(\t(\tP"
IDS, ASKED = "#1 ID\t#2 ID\t#1 String\t#2 String", "question1\tquestion2"
QNLI = "index\tquestion\tsentence"
STS = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
DOG = "0\tnews\tMSR\t2012\t1\tx\ty\tA dog.\tA cat."
TWO = "index\tsentence1\tsentence2"
LAYOUTS = {  # of labelled files and of test files: text, texts, labels
    "CoLA": (
        ("gj04\t1\t\tWe won.\ngj04\t0\t*\tThe box ran.\n", "We won.|The box ran.", (1, 0)),
        ("index\tsentence\n0\tBill ran.\n", "Bill ran.", None),
    ),
    "SST-2": (
        ("sentence\tlabel\nhide new \t0\nthat loves \t1\n", "hide new |that loves ", (0, 1)),
        ("index\tsentence\n0\tuneasy mishmash .\n", "uneasy mishmash .", None),
    ),
    "MRPC": (
        (f"Quality\t{IDS}\n1\t70\t71\tA ran .\tA fled .\n", "A ran .+A fled .", (1,)),
        (f"index\t{IDS}\n0\t10\t11\tB .\tC .\n", "B .+C .", None),
    ),
    "STS-B": (
        (f"{STS}\tscore\n{DOG}\t2.600\n", "A dog.+A cat.", (2.6,)),
        (f"{STS}\n{DOG}\n", "A dog.+A cat.", None),
    ),
    "QQP": (
        (f"id\tqid1\tqid2\t{ASKED}\tis_duplicate\n7\t1\t2\tWhy?\tHow?\t0\n", "Why?+How?", (0,)),
        (f"id\t{ASKED}\n0\tWho?\tWhat?\n", "Who?+What?", None),
    ),
    "MNLI": (
        (
            f"{MNLI}\tlabel1\tgold_label\n{PARSED}0\tH\tx\tneutral\n{PARSED}1\tH\tx\tentailment\n"
            f"{PARSED}2\tH\tx\tcontradiction\n",
            "P0+H|P1+H|P2+H",
            (1, 0, 2),
        ),
        (f"{MNLI}\n{PARSED}\tH\n", "P+H", None),
    ),
    "QNLI": (
        (f"{QNLI}\tlabel\n0\tWhen?\tIn 1990.\tentailment\n", "When?+In 1990.", (0,)),
        (f"{QNLI}\n0\tWhen?\tNow.\n", "When?+Now.", None),
    ),
    "RTE": (
        (f"{TWO}\tlabel\n0\tRain.\tWet.\tnot_entailment\n", "Rain.+Wet.", (1,)),
        (f"{TWO}\n0\tRain.\tWet.\n", "Rain.+Wet.", None),
    ),
    "WNLI": (
        (f"{TWO}\tlabel\n0\tIt is big.\tA is big.\t1\n", "It is big.+A is big.", (1,)),
        (f"{TWO}\n0\tIt.\tA.\n", "It.+A.", None),
    ),
}
RTE = "index\tsentence1\tsentence2\tlabel\n"
SCORE = "sentence1\tsentence2\tscore\n"


def read(folder, content, task="RTE", side="train"):
    (folder / task).mkdir(exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    (folder / task / f"{side}.tsv").write_bytes(data)
    return glue_data.read(str(folder), task, side)


def expected(texts):
    return [tuple(text.encode() for text in pair.split("+")) for pair in texts.split("|")]


@pytest.mark.core
@pytest.mark.parametrize("test", [False, True], ids=["labelled", "test"])
@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_read_as_it_is_laid_out(task, test, tmp_path):
    content, texts, labels = LAYOUTS[task][test]
    dev = TASKS[task].dev
    for side in [one.replace("dev", "test") for one in dev] if test else ["train", *dev]:
        found = read(tmp_path, content, task, side)
        assert list(found.texts) == expected(texts)
        assert len(found) == len(expected(texts))
        if labels is None:
            assert found.labels is None
        else:
            assert found.labels.dtype == (np.float32 if task == "STS-B" else np.int32)
            np.testing.assert_array_equal(found.labels, np.array(labels, found.labels.dtype))


A_FILE_MAY_HAVE = {
    "BOM": (b"\xef\xbb\xbf" + RTE.encode() + b"0\ta\tb\tentailment\n", "a+b"),
    "CRLF": (RTE.replace("\n", "\r\n") + "0\ta\tb\tentailment\r\n", "a+b"),
    "no last break": (RTE + "0\ta\tb\tentailment", "a+b"),
    "empty lines": (RTE + "0\ta\tb\tentailment\n\n\n", "a+b"),
    "quotes": (RTE + '0\t"a\tb" c"\tentailment\n', '"a+b" c"'),
    "other breaks": (RTE + "0\ta\u2028a\x0b\x85\tb\rb\tentailment\n", "a\u2028a\x0b\x85+b\rb"),
    "other order": ("label\tsentence2\tmore\tsentence1\nentailment\tb\tx\ta\n", "a+b"),
    "empty text": (RTE + "0\t\tb\tentailment\n", "+b"),
}


@pytest.mark.parametrize(("content", "texts"), A_FILE_MAY_HAVE.values(), ids=A_FILE_MAY_HAVE)
def test_what_a_file_may_have(content, texts, tmp_path):
    found = read(tmp_path, content)
    assert list(found.texts) == expected(texts)
    assert found.labels.tolist() == [0]


@pytest.mark.core
@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("RTE", "", "RTE/train.tsv is empty"),
        ("RTE", RTE, "RTE/train.tsv has no examples"),
        ("CoLA", "", "CoLA/train.tsv has no examples"),
        ("RTE", "index\tsentence1\tsentence2\n0\ta\tb\n", "line 1: got 0 columns 'label'"),
        ("RTE", "label\tlabel\tsentence1\tsentence2\n", "line 1: got 2 columns 'label'"),
        ("RTE", RTE + "0\ta\tb\tentailment\n\n1\ta\tentailment\n", "line 4: got 3 fields"),
        ("RTE", RTE + "0\ta\tb\tc\tentailment\n", "line 2: got 5 fields; allowed: 4"),
        ("CoLA", "gj04\t1\tOur friends won.\n", "line 1: got 3 fields; allowed: 4"),
        ("RTE", RTE + "0\ta\tb\tyes\n", "line 2: got 'yes' for label; allowed: one of entailment"),
        ("RTE", RTE + "0\ta\tb\t\n", "line 2: got '' for label"),
        ("CoLA", "gj04\t2\t\ta\n", "line 1: got '2' for label; allowed: one of 0, 1"),
        (
            "STS-B",
            SCORE + "a\tb\t5.1\n",
            "line 2: got '5.1' for score; allowed: a number from 0 to 5",
        ),
        ("STS-B", SCORE + "a\tb\tnan\n", "line 2: got 'nan' for score"),
        ("STS-B", SCORE + "a\tb\thigh\n", "line 2: got 'high' for score"),
        ("RTE", RTE.encode() + b"1\tcaf\xe9\tb\tentailment\n", "line 2: got the byte 0xe9"),
        ("RTE", RTE.encode("utf-16"), "line 1: got the byte 0xff, which is not UTF-8"),
    ],
)
def test_what_is_no_glue_file_is_told_with_its_line(task, content, message, tmp_path):
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path, content, task)


def test_lines_that_a_text_divides_are_left_out_of_qqp_alone(tmp_path):
    content, _, _ = LAYOUTS["QQP"][0]
    divided = '8\t1\t2\t"Why\n"\tBecause?\t0\n9\t1\t2\tA?\tB?\t1\n'
    message = r"QQP/train\.tsv: left out 2 lines that a line break divides"
    with pytest.warns(UserWarning, match=message):
        found = read(tmp_path, content + divided, "QQP")
    assert list(found.texts) == expected("Why?+How?|A?+B?")
    assert found.labels.tolist() == [0, 1]


@pytest.mark.core
def test_a_bert_is_given_one_text_or_two():
    tokens, segments = glue_text.encode((b"ab",), 8)
    assert tokens.tolist() == [CLS, 97, 98, SEP, PAD, PAD, PAD, PAD]
    assert segments.tolist() == [0] * 8
    tokens, segments = glue_text.encode((b"ab", b"c"), 8)
    assert tokens.tolist() == [CLS, 97, 98, SEP, 99, SEP, PAD, PAD]
    assert segments.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    tokens, _ = glue_text.encode(("é\xff".encode(),), 8)
    assert tokens.tolist() == [CLS, 0xC3, 0xA9, 0xC3, 0xBF, SEP, PAD, PAD]
    assert len({CLS, SEP, PAD, 256, *range(256)}) == glue_text.VOCAB == 260


@pytest.mark.parametrize("sequence", [8, 9, 20])
def test_the_longer_text_loses_its_end_first(sequence):
    for m in range(14):
        for n in range(14):
            first, second = list(range(m)), list(range(100, 100 + n))
            while len(first) + len(second) > sequence - 3:  # Devlin et al.'s loop
                (first if len(first) > len(second) else second).pop()
            tokens, _ = glue_text.encode((bytes(range(m)), bytes(range(100, 100 + n))), sequence)
            want = [CLS, *first, SEP, *second, SEP]
            assert tokens.tolist() == want + [PAD] * (sequence - len(want))


def numbered(n):
    return glue_data.Examples([(str(i).encode(),) for i in range(n)], np.arange(n, dtype=np.int32))


def test_a_batch_is_a_function_of_seed_and_step_and_an_epoch_has_each_example_once():
    batch = lambda seed, step, n: glue_text.sample(numbered(n), seed, step, 4, 8)
    draw = lambda seed, step, n=10: batch(seed, step, n)["labels"].tolist()
    drawn = [label for step in range(1, 6) for label in draw(0, step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert draw(0, 3) == drawn[8:12]
    assert draw(0, 1, 100) != draw(1, 1, 100)
    made = glue_text.sample(numbered(3), 0, 1, 7, 8)
    assert made["tokens"].shape == made["segments"].shape == (7, 8)
    assert [chr(t) for t in made["tokens"][:, 1]] == [str(label) for label in made["labels"]]
    part = glue_text.sample(numbered(3), 0, 1, 7, 8, slice(2, 5))
    assert {name: array.tolist() for name, array in part.items()} == {
        name: array[2:5].tolist() for name, array in made.items()
    }


def test_evaluation_has_every_example_once():
    batch = lambda examples, indices: glue_text.batch(examples, indices, 8)
    five, unlabelled = numbered(5), glue_data.Examples([(b"a",)], None)
    parts = [batch(five, indices)["labels"].tolist() for indices in glue_text.windows(five, 2)]
    assert parts == [[0, 1], [2, 3], [4]]
    assert "labels" not in batch(unlabelled, next(glue_text.windows(unlabelled, 2)))


def test_each_task_is_measured_as_glue_has_it():
    wanted, got = np.array([1, 1, 1, 0, 0, 0]), np.array([1, 1, 0, 0, 0, 1])
    assert measure(TASKS["RTE"], wanted, got) == {"accuracy": pytest.approx(4 / 6)}
    both = {"accuracy": pytest.approx(4 / 6), "f1": pytest.approx(2 / 3)}
    assert measure(TASKS["MRPC"], wanted, got) == both
    assert measure(TASKS["CoLA"], wanted, got) == {"matthews": pytest.approx(1 / 3)}
    scores = np.array([0.0, 1.0, 2.0, 5.0])
    found = measure(TASKS["STS-B"], scores, scores**3)
    assert found["spearman"] == pytest.approx(1)
    assert found["pearson"] == pytest.approx(np.corrcoef(scores, scores**3)[0, 1])
    three = np.array([0, 1, 2, 2])
    assert measure(TASKS["MNLI"], three, three) == {"accuracy": 1.0}


@pytest.mark.parametrize("task", ["CoLA", "QQP", "STS-B"])
def test_what_does_not_vary_measures_zero_without_a_warning(task):
    found = measure(TASKS[task], np.array([0, 1, 1]), np.zeros(3, int))
    others = [value for name, value in found.items() if name != "accuracy"]
    assert others == [0.0] * (2 if task == "STS-B" else 1)
