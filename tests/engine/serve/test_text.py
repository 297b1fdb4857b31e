"""Tokens to text as it appears, stop strings, and the tokenizer's view of single tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.engine.serve.chat import ChatTemplate, ChatTemplateError
from tkcc.engine.serve.tokenizer import StopStrings, TextStream, Tokenizer
from tkcc.models.checkpoint import CheckpointError
from tkcc.models.random_model import Shape, write_random_model

TEXTS = [
    "plain words, and  spaces ",
    "Größe — naïve café",
    "日本語のテキスト",
    "emoji 👩‍👩‍👧 and flags 🇫🇷",
    "\n\ttabs\r\n",
    "",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, Shape(layers=1))
    return directory


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.load(model)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_make_up_the_text(text, tokenizer):
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(3, 258), max_size=30))
def test_any_bytes_give_the_text_of_decoding_them_at_once(tokenizer, ids):
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in ids) + stream.flush() == tokenizer.decode(ids)


def test_special_tokens_are_read_and_not_shown(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.eos_ids == {2} and tokenizer.token_text(2) == "<|im_end|>"


def test_every_token_has_bytes_and_a_text_of_its_own(tokenizer):
    texts = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size)]
    assert len(set(texts)) == len(texts)
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("naïve 👩")) == "naïve 👩".encode()
    assert sum(text.startswith("bytes:\\x") for text in texts) == 128  # the upper half is no character alone
    assert tokenizer.token_bytes(10_000) == b""  # a padded vocabulary


@pytest.mark.parametrize(
    "stops, pieces, want, is_hit",
    [
        (["END"], ["one END two"], "one ", True),
        (["END"], ["one E", "ND two"], "one ", True),
        (["END"], ["one E", "N", "x"], "one ENx", False),
        (["END"], ["one EN"], "one EN", False),
        (["\n\n", "."], ["a", "\n", "b.", "c"], "a\nb", True),
        (["bc", "abcd"], ["a", "b", "cd"], "", True),
        (["aab"], ["aa", "ab"], "a", True),
        ([], ["any", "thing"], "anything", False),
        ([""], ["any"], "any", False),
    ],
)
def test_text_ends_before_the_first_stop_string(stops, pieces, want, is_hit):
    stop = StopStrings(stops)
    assert "".join(stop.push(piece) for piece in pieces) + stop.flush() == want
    assert stop.is_hit is is_hit


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.data())
def test_how_text_is_cut_into_pieces_does_not_matter(text, stops, data):
    whole, cut = StopStrings(stops), StopStrings(stops)
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    shown = "".join(cut.push(piece) for piece in pieces) + cut.flush()
    first = min((i for s in stops if (i := text.find(s)) >= 0), default=None)
    if first is None:
        assert shown == text
    else:  # a piece may complete a shorter stop string before a longer one that starts earlier
        assert text.startswith(shown) and cut.is_hit and len(shown) >= first
        assert whole.push(text) == text[:first]


def test_a_chat_template_is_rendered_with_the_assistants_opening():
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert template.render([{"role": "user", "content": "hi"}]) == "[user:hi]>"


@pytest.mark.parametrize(
    "source, want",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages[9].content }}", "refuses these messages"),
        ("{{ (10 ** 9) | string | length }}{% for i in range(10**9) %}{% endfor %}", "refuses these messages"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_an_error(source, want):
    with pytest.raises(ChatTemplateError, match=want):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_a_broken_template_is_named():
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)
