"""``unweight generate`` and ``unweight serve`` on a small chat model: the texts are those of the BF16 checkpoint."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import tiny_chat
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import unweight
from unweight.errors import CheckpointError
from unweight.text_generation import generate_text

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_chat.save_model(tmp_path_factory.mktemp("model"), seed=4, initializer_range=0.3)


@pytest.fixture(scope="module")
def bundle(checkpoint, tmp_path_factory):
    target = tmp_path_factory.mktemp("bundle") / "bundle"
    unweight.convert(checkpoint, target, workers=1)
    return target


@pytest.fixture(scope="module")
def answer(checkpoint):
    """What transformers makes of a question with the dense model."""

    def ask(question):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    return ask


@pytest.mark.parametrize("residency", ["auto", "huffman"])
@pytest.mark.filterwarnings("ignore::unweight.bundle_load.DecodedOnCpuWarning")
def test_bundle_and_checkpoint_say_the_same(checkpoint, bundle, answer, residency):
    want = answer("Who are you?")
    options = {"chat": True, "max_new_tokens": NEW_TOKENS, "device": "cpu"}
    assert generate_text(checkpoint, ["Who are you?"], **options).texts == [want]
    report = generate_text(bundle, ["Who are you?", "And now?"], residency=residency, **options)
    assert report.texts[0] == want
    assert report.stats.batch == 2


@pytest.mark.filterwarnings("ignore::unweight.bundle_load.DecodedOnCpuWarning")
def test_the_command_writes_the_text_to_stdout_and_the_rest_to_stderr(bundle, answer, monkeypatch, capsys):
    from unweight import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["unweight", "generate", str(bundle), "--device", "cpu", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = done.code or 0
        return code, *capsys.readouterr()

    wanted = ("--prompt", "Who are you?", "--chat", "--max-new-tokens", str(NEW_TOKENS))
    code, out, err = run(*wanted)
    assert code == 0
    assert out == answer("Who are you?") + "\n"
    assert "tokens/s" in err
    code, out, err = run(*wanted, "--json")
    found = json.loads(out)
    assert found["texts"] == [answer("Who are you?")]
    assert found["tokens_per_second"] >= 0
    drawn = [run(*wanted, "--temperature", "2", "--seed", "3")[1] for _ in range(2)]
    assert drawn[0] == drawn[1] != out
    code, out, err = run(*wanted, "--top-p", "0")
    assert (code, out) == (0, answer("Who are you?") + "\n"), "greedy texts take no probability"
    code, out, err = run(*wanted, "--temperature", "1", "--top-p", "0")
    assert code == 2
    assert "top_p is 0" in err


def test_what_cannot_be_opened_is_one_clear_error(tmp_path, bundle, checkpoint):
    with pytest.raises(CheckpointError, match="can't be read as a model"):
        generate_text(tmp_path, ["x"], device="cpu")
    with pytest.raises(CheckpointError, match="convert it first"):
        generate_text(checkpoint, ["x"], device="cpu", residency="palette")
    with pytest.raises(ValueError, match="--prompt"):
        generate_text(bundle, [])


def test_serve_answers_an_openai_request(bundle, answer, tmp_path):
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip('the server needs fastapi, uvicorn and openai: pip install "unweight[serve]"')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "unweight.cli", "serve", str(bundle), "--device", "cpu", "--host", "127.0.0.1"]
    log = tmp_path / "log"
    with open(log, "w") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdout=output, stderr=output, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        body = {
            "model": str(bundle), "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": NEW_TOKENS,
            "generation_config": json.dumps({"do_sample": False, "max_new_tokens": NEW_TOKENS}),
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        until = time.monotonic() + 200
        while True:
            try:
                with urllib.request.urlopen(request, timeout=100) as response:
                    found = json.load(response)
                break
            except urllib.error.HTTPError as error:
                pytest.fail(f"{error}: {error.read().decode()}\n{log.read_text()}")
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.3)
        assert found["choices"][0]["message"]["content"] == answer("Who are you?")
        assert found["object"] == "chat.completion"
    finally:
        server.terminate()
        server.wait(20)


def test_without_transformers_the_error_says_what_to_install(bundle):
    script = (
        "import sys\nsys.modules['transformers'] = None\n"
        "from unweight import cli\n"
        f"sys.argv = ['unweight', 'generate', {str(bundle)!r}, '--prompt', 'x']\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install "unweight[' in done.stderr
    assert "defect" not in done.stderr
