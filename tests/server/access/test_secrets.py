"""Secrets of configurations: masked in every response and log, kept for runs and forks."""

import json
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, experiment_config, validation
from zerolab.client.archive import pack
from zerolab.config import load_experiment
from zerolab.contract.secret_text import (
    is_secret_name,
    is_secret_url,
    mask_assignments,
    mask_values,
)
from zerolab.contract.secrets import find_secrets, mask_secrets, masked_paths, restore_secrets
from zerolab.errors import ConfigError

S3 = {"type": "s3", "bucket": "b", "endpoint_url": "http://127.0.0.1:9"}
KEYS = {"access_key": "AKIA-hush-1", "secret_key": "hush-hush-2"}
SECRETS: dict[str, Any] = {
    "environment": {"environment_variables": ["WANDB_API_KEY=hush-hush-3", "COLOUR=green"]},
    "data": {"login": {"password": "hush-hush-4", "passwd": 4711}, "path": "/data"},
}


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MYSQL_PWD", "apiKey",
        "GITHUB_PAT", "AZURE_STORAGE_CONNECTION_STRING", "SMTP_PASS", "NGC_API_KEY_2", "password",
    ],
)  # fmt: skip
def test_secret_names_are_recognized(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PATH", "AUTHOR", "KEYBOARD", "COMPASS", "LR"]
)
def test_other_names_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "variables",
    [
        ["A_TOKEN=hush-1", "B=2", "C_KEY=", "URL=https://me:hush-2@host/x"],
        {"cpu": ["A_TOKEN=hush-1"], "cuda": ["A_TOKEN=hush-2", "B=2"]},
        {"gpu": ["A_TOKEN=hush-1"]},
        ["SSHPASS=hush-1", "INDEX=https://hush-hush-hush-hush@host/x", "B=az://c?a=1&sig=hush-2"],
    ],
)
@pytest.mark.parametrize(
    "entrypoint",
    [
        "env A_KEY='hush 5' A_KEY=hush-6 python train.py --api_key=hush-7 --hub-token hush-8 -k x",
        ["env", "A_KEY=hush-5", "x", "--token", "hush-6", "--token", "hush-7", "--key=hush-8"],
        "python train.py --use_auth_token --lr 0.1 wandb.key=hush-5",
        "t --a_key=db://u:hush-5@h --db db://u:hush-6@h --to=https://h/?a=1&sig=hush-7 | tee x",
        ["bash", "-c", "HF_TOKEN=hush-5 python train.py --db db://u:hush-6@h --a-key hush-7"],
        ["python", "--token", "db://u:hush-5@h", "--db", "db://u:hush-6@h"],
        "mysql -u root -phush-5 -e 'a; b' && /usr/bin/mysqldump --x=1 -p'hush 6' db | sh",
        ["mysql", "-u", "root", "-phush 5", "-e", "select 1"],
        "sshpass -p hush-5 ssh -p 22 h; docker login -u me -p hush-6; redis-cli -h x -a hush-7",
        "curl -u me:hush-5 -H 'Authorization: Bearer hush-6' -H \"X-Api-Key: hush-7\" https://h/x",
        ["curl", "--user", "me:hush-5", "-H", "X-Api-Key: hush-6", "--proxy-user=me:hush-7"],
        't.py --config \'{"api_key": "hush-5", "lr": 1}\' -token hush-6 +db.password=hush-7',
        'TOKEN=hush-5 t.py --password=hush-6 --password hush-7; PW="hush \\" 8" t.py',
        'bash -c "mysql -phush-5 < x.sql" && mongosh --x -p hush-6 db://u:hu@hush@h/x',
    ],
)
def test_restore_undoes_mask(variables: Any, entrypoint: Any) -> None:
    config = experiment_config(
        environment={"environment_variables": variables},
        entrypoint=entrypoint,
        checkpoint_storage=S3 | KEYS,
        data=SECRETS["data"],
    )
    shown = mask_secrets(config)
    assert "hush" not in json.dumps(shown)
    assert restore_secrets(shown, config) == config
    assert all(value not in json.dumps(shown) for value in find_secrets(config))
    assert mask_secrets(shown) == shown


def test_data_under_secret_name_is_masked() -> None:
    config = {
        "data": {
            "token": {"value": "hush-1"}, "keys": [["hush-2"], {"a": "hush-3"}],
            "urls": ["postgres://me:hush-4@host/x", "https://host/x?X-Amz-Signature=hush-5"],
        }
    }  # fmt: skip
    shown = mask_secrets(config)
    assert "hush" not in json.dumps(shown)
    assert restore_secrets(shown, config) == config


@pytest.mark.parametrize(
    ("config", "masked"),
    [
        ({"data": {"password": 1234, "user": 17}}, 1),
        ({"data": {"db": {"passwd": 1.5}, "token": 123456789}}, 2),
        ({"data": {"secret": [{"pin": 12}], "api_key": 987654321}}, 2),
        ({"entrypoint": "t.py --password 1234 --db_password=99 --seed 1234"}, 2),
        ({"entrypoint": ["t.py", "--password", "1234", "--passwd=5", "--seed", "1234"]}, 2),
        ({"entrypoint": "mysql -p1234 -P 3306"}, 1),
        ({"entrypoint": "ftp ftp://me:1234@host/x"}, 1),
        ({"environment": {"environment_variables": ["PGPASSWORD=1234", "ARGS=--pw 77"]}}, 2),
        ({"data": {"command": "mysql -p1234", "dsn": "host=x password=77 user=me"}}, 2),
    ],
)
def test_numeric_passwords_are_masked(config: dict[str, Any], masked: int) -> None:
    shown = mask_secrets(config)
    assert json.dumps(shown).count("********") == masked
    assert restore_secrets(shown, config) == config
    assert len(find_secrets(config)) >= masked


@pytest.mark.parametrize(
    "config",
    [
        {"data": {"pad_token": 0, "key_dim": 64.0, "use_auth_token": True, "token": None}},
        {"data": {"text": "mysql and -p 3", "note": "a key: value"}},
        {"entrypoint": "python train.py -p 3 --port 22 --login -p 8 --model key:loss"},
        {"entrypoint": 'HF_TOKEN=$HF_TOKEN t.py --token ${T} --password "$(cat /run/pw)"'},
        {"entrypoint": "export HF_TOKEN=$TOKEN; python t.py"},
        {"entrypoint": "t.py --key-size 64; t.py --pad-token=0 | tee x"},
        {"entrypoint": "mysql -u root -p db && docker run -p 8080:80 x; ssh -p 22 h"},
        {"entrypoint": ["torchrun", "--rdzv_endpoint", "h:1", "-p", "3", "t.py"]},
    ],
)
def test_harmless_values_are_shown(config: dict[str, Any]) -> None:
    assert mask_secrets(config) == config


def test_short_secrets_are_masked_after_a_name() -> None:
    config = {"data": {"password": 1234}, "entrypoint": "x db://me:hush@host/db"}
    secrets = find_secrets(config)
    for line in (
        "password: 1234", '{"password": 1234}', "--password 1234", "DB_PASSWORD='1234'",
        "mysql -p1234", "db://me:hush@other/db", "PGPASSWORD=hush x",
    ):  # fmt: skip
        assert "********" in mask_values(line, secrets), line
    for line in ("step 1234 of 12345", "password of 5 x 1234.5", "hush now"):
        assert mask_values(line, secrets) == line


def test_addresses_without_secrets_are_shown() -> None:
    urls = [
        "ssh://git@host/x",
        "https://host:80/x?page=1&limit=2",
        "s3://bucket/a@b",
        "db://me@h/x",
    ]
    for url in urls:
        config = {
            "data": {"url": url},
            "entrypoint": f"python t.py --db {url}",
            "environment": {"environment_variables": [f"URL={url}"]},
        }
        assert mask_secrets(config) == config


def test_small_numbers_in_commands_are_shown() -> None:
    for entrypoint in ("python t.py --key_dim 64 --pad-token-id=0", ["t.py", "--key-size", "64"]):
        assert mask_secrets({"entrypoint": entrypoint}) == {"entrypoint": entrypoint}


COMMANDS: list[tuple[Any, list[str]]] = [
    ("sshpass -pTopSecret9 torchrun train.py", ["TopSecret9"]),
    (["sshpass", "-pTopSecret9", "torchrun", "train.py"], ["TopSecret9"]),
    ("sshpass -p TopSecret9 ssh -p 22 host torchrun", ["TopSecret9"]),
    ("sshpass -p 'Top Secret' ssh host", ["Top Secret"]),
    ("sshpass -p mysql ssh -pabc host", ["mysql"]),
    ("sshpass -pmyToken mysql -pabcdef db1", ["myToken", "abcdef"]),
    ("sshpass -p $PASSWORD torchrun train.py", []),
    ("sshpass -p \\\n  abcdef ssh host", ["abcdef"]),
    ("mysqldump -pmypassword db1", ["mypassword"]),
    ("mysqldump -pmypassword db1 | gzip > x.gz", ["mypassword"]),
    ("mysql -pMyToken=abc db1", ["MyToken=abc"]),
    ("mysql --token 'x -pfoo' -pabcdef db1", ["x -pfoo", "abcdef"]),
    ("t.py --token mysql -pabc db1", ["mysql"]),
    (["t.py", "--token", "mysql", "-pabc", "db1"], ["mysql"]),
    (["mysqldump", "-pmypassword", "db1"], ["mypassword"]),
    ("mysql -p$(cat pw) db1", []),
    ('mysql -p"" db1', []),
    ("unknown -pmypassword db1", []),
    (["unknown", "-pmypassword", "db1"], []),
    ("7z x -pSecretKey a.7z out", ["SecretKey"]),
    ("unzip -PMyKey a.zip b", ["MyKey"]),
    ("ldapsearch -wMyKey x y", ["MyKey"]),
    ("t.py -password abc -passphrase def -pw ghi -pat jkl", ["abc", "def", "ghi", "jkl"]),
    ("t.py -private-key abc -wandb-token def x", ["abc", "def"]),
    ("gradle -PapiKey=abc build", ["abc"]),
    ("redis-cli -a my-token get x", ["my-token"]),
    (["redis-cli", "-a", "TOKEN=abc", "get"], ["TOKEN=abc"]),
    ("curl -u me:my_token=abc https://host/x", ["my_token=abc"]),
    (["curl", "--user", "me:pw", "--proxy-user=me:pw2", "x"], ["pw", "pw2"]),
    ("curl -H 'Authorization: Bearer hf_abcdef' x", ["Bearer hf_abcdef", "hf_abcdef"]),
    ("docker login -u me -p abc host && mysql -pdef", ["abc", "def"]),
    ("TOKEN='abc'def'ghi' x", ["abc'def'ghi", "abcdefghi"]),
    ("TOKEN=a'b c'd x", ["a'b c'd", "ab cd"]),
    ("TOKEN=a'b'c\"d e\"f'g' x", ["a'b'c\"d e\"f'g'", "abcd ef" + "g"]),
    ("bash -c \"TOKEN='ab'c'd' x\" \"y\"", ["ab'c'd", "abcd"]),
    ("bash -c 'TOKEN=abc' x 'y'; z 'w'", ["abc"]),
    ("t.py --api-key \\\n  abc --lr 1", ["abc"]),
    ("t.py --api-key \\\r\n\\\r\n  abc --lr 1", ["abc"]),
    ("t.py --use-token \\\n  --lr 1", []),
    ("t.py --use_token | tee x && y --use_token 2>&1", []),
    ("TOKEN=abc \\\n  t.py", ["abc"]),
    ("t.py --token \"ab\\\"c\" x", ['ab\\"c', 'ab"c']),
    ("t.py --config '{\"api_key\": \"abc\", \"lr\": 1}' x", ["abc"]),
    ("t.py --env=A=b,C=d,TOKEN=abc --lr=1", ["abc"]),
    ('{"cmd": "mysql -pabc", "api_key": "def", "x": [1]}', ["abc", "def"]),
    ('{"cmd":["TOKEN=abc","x"],"env":["A_KEY=def"],"api_key":"ghi"}', ["abc", "def", "ghi"]),
    ('bash -c "mysql -pabc" x {"api_key": "def"}', ["abc", "def"]),
    (["bash", "-c", "sshpass -pTopSecret9 torchrun"], ["TopSecret9"]),
    (["t.py", "--token", '"', "--key", "''", "--lr"], ['"']),
    ("t.py --token '' --password \"\" x", []),
    ("t.py --token=' ' x", []),
    (["t.py", "--token", "--key", "abc", "def"], ["abc"]),
    ("wget https://host/x?page=1 y --key_dim 64", []),
    ("sshpass -e ssh -p 22 host", []),
    (["sshpass", "-f", "/pw", "-v", "scp", "-P", "22", "a", "b"], []),
    ("sshpass -P word: -p abc ssh -p 22 host; sshpass -e ssh -p 23 host", ["abc"]),
    ("TOKEN=abc;python x", ["abc"]),
    ("bash -c \"TOKEN='a;b'&&x --token def|y\"", ["a;b", "def"]),
    ("TOKEN=`cat pw` x --token=$(cat pw);y", []),
    ("t.py --c '{\"api_keys\": [\"ab\", \"cd\"], \"keys\": {\"x\": \"ef\"}}'", ["ab", "cd", "ef"]),
    ("t.py --c \"{\\\"api_key\\\": \\\"a b\\\", \\\"api_keys\\\": [\\\"cd\\\"]}\"", ["a b", "cd"]),
    ("t.py --config '{api_keys: [ab, \"cd\"], lr: 1, token: ef}'", ["ab", "cd", "ef"]),
    ("cat > f <<E\napi_key: 'ab'\nkeys:\n  - cd\n  - \"ef\"\nlr: 1\nE", ["ab", "cd", "ef"]),
    ("t.py --api-keys ab cd --lr 1", ["ab", "cd"]),
    (["t.py", "--api-keys", "ab", "cd", "--lr", "1"], ["ab", "cd"]),
    ("t.py --api-keys=ab,cd", ["ab", "ab,cd", "cd"]),
    ("t.py --env=TOKEN=ab,lr=1", ["ab", "ab,lr=1"]),
    ("env \"HF_TOKEN\"=abc t.py", ["abc"]),
    ("curl -HX-Api-Key:ab -H Accept:x --header=X-Auth:cd -H \"Cookie:ef\" x", ["ab", "cd", "ef"]),
    (["curl", "-H", "X-Api-Key:ab", "--header=X-Auth: cd"], ["ab", "cd"]),
    ("wandb login --relogin ab && t.py; wandb login; t.py", ["ab"]),
    (["wandb", "login", "--relogin", "ab"], ["ab"]),
    ("aws configure set aws_secret_access_key ab", ["ab"]),
    ("echo 'machine h login u password ab' > x", ["ab"]),
    ("docker login -u me --password-stdin h;docker run -p 80:80 x", []),
    ("t.py --input_key text --label-key=y --pad_token '<|end|>' --image_token=x", []),
    ("t.py --use_auth_token true --pass_rate 0.5 --password-file /x --token_path=/y", []),
    ("t.py --max_tokens 512 --tokenizer x --num_key_value_heads 8 --author me key.path=1", []),
]  # fmt: skip


@pytest.mark.parametrize(("command", "secrets"), COMMANDS)
@pytest.mark.parametrize("key", ["entrypoint", "data"])
def test_only_secrets_of_commands_are_masked(key: str, command: Any, secrets: list[str]) -> None:
    config = {"entrypoint": command} if key == "entrypoint" else {"data": {"command": command}}
    shown = mask_secrets(config)
    assert sorted(find_secrets(config)) == sorted(secrets)
    assert restore_secrets(shown, config) == config
    assert mask_secrets(shown) == shown
    assert (shown == config) == (not secrets)
    assert mask_secrets(config, for_trial=True)["data" if key == "data" else key]


@pytest.mark.parametrize(
    "text",
    [
        ",".join(f"f{i}=0" for i in range(50_000)),
        "?a=" * 100_000,
        "--a" * 100_000,
        "x=https://" * 30_000,
        "://a" * 80_000,
        "curl -u a:b;" * 30_000,
        "curl -u " + "=" * 300_000,
        "curl \\\n" * 50_000,
        "mysql -p'" * 30_000,
        "token=" * 50_000,
        "--token \\\n" * 30_000,
        "--token x " * 30_000,
        '"a":' * 80_000,
        "a" * 300_000,
        "$(" * 150_000,
        '"a_key":["' * 50_000,
        '"a_key":[\\"' * 50_000,
        "--keys a " * 60_000,
        "sshpass " + "-f a " * 80_000,
        "TOKEN=`" * 50_000,
        " " * 300_000,
    ],
    ids=lambda text: text[:10],
)
def test_masking_takes_linear_time(text: str) -> None:
    # A quadratic search takes minutes.
    text = text[:100_000]
    started = time.process_time()
    mask_secrets({"entrypoint": text})
    assert is_secret_url(text) in {True, False}
    mask_assignments(text)
    assert time.process_time() - started < 10


def test_many_assignments_in_data_are_no_error(sqlite_server: Server) -> None:
    text = ",".join(f"f{i}=0" for i in range(1100)) + ",a_token=hush"
    response = sqlite_server.try_submit(data={"t": text})
    assert response.is_success, response.text
    assert "hush" not in json.dumps(sqlite_server.experiment())


def test_signature_after_a_long_path_is_masked() -> None:
    url = f"https://host/{'x' * 250}/y?a=1&X-Amz-Signature=hush-1"
    config = {"entrypoint": f"wget {url}", "data": {"url": url}}
    shown = mask_secrets(config)
    assert "hush" not in json.dumps(shown)
    assert "hush-1" in find_secrets(config)
    assert restore_secrets(shown, config) == config


def test_empty_values_are_no_secrets() -> None:
    config = {
        "checkpoint_storage": {**S3, "access_key": "", "secret_key": 0},
        "environment": {"environment_variables": ["A_KEY=", "B_KEY= "]},
        "data": {"password": "", "token": " "},
        "entrypoint": ["t.py", "--token", ""],
    }
    assert find_secrets(config) == ["0"]
    assert restore_secrets(mask_secrets(config), config) == config
    assert mask_values("a line: with text", ["", *find_secrets(config)]) == "a line: with text"


def test_credentials_of_a_header_are_masked_in_logs() -> None:
    configs = [
        {"entrypoint": "curl -H 'Authorization: Bearer hush-hush' https://host"},
        {"entrypoint": ["curl", "-H", "Proxy-Authorization: Negotiate hush-hush"]},
        {"data": {"headers": {"X-Auth": "Token hush-hush"}}},
        {"data": {"auth": "Authorization: Bearer hush-hush"}},
        {"environment": {"environment_variables": ["AUTHORIZATION=Bearer hush-hush "]}},
    ]
    for config in configs:
        assert "hush" not in mask_values("login with hush-hush failed", find_secrets(config))
    assert find_secrets({"data": {"password": "correct horse"}}) == ["correct horse"]


def test_commands_as_lists_in_data_are_masked() -> None:
    config = {
        "data": {
            "a": ["mysql", "-phush-1", "db1"],
            "b": [["t.py", "--token", "hush-2", {"key": "hush-3"}, "db://me:hush-4@host/x", 3]],
            "c": ["-x", "--password=hush-5", "bash -c 'PW=hush-6'"],
            "d": ["a", "-", "b", 1.5],
        }
    }
    shown = mask_secrets(config)
    assert "hush" not in json.dumps(shown)
    assert shown["data"]["a"] == ["mysql", "-p********", "db1"]
    assert shown["data"]["d"] == config["data"]["d"]
    assert restore_secrets(shown, config) == config
    assert masked_paths({"data": {"x": ["-x", "********"]}}) == ["data.x.1"]


def test_assignments_in_messages_are_masked() -> None:
    for message in (
        "--api-key \\\n hush", "x--y --token hush", "sshpass -phush t && mysql -phush",
        "--env=TOKEN=hush x", "cmd: a_token: hush", "--key=hush==",
    ):  # fmt: skip
        assert "hush" not in mask_assignments(message)


def test_restore_fits_other_shapes_of_variables() -> None:
    config = {"environment": {"environment_variables": ["A_KEY=hush"]}}
    two = {"environment": {"environment_variables": {"cpu": ["A_KEY=********"], "cuda": []}}}
    assert "A_KEY=hush" in json.dumps(restore_secrets(two, config))
    back = restore_secrets(mask_secrets(config), {"environment": {
        "environment_variables": {"cuda": ["A_KEY=hush"]}}})  # fmt: skip
    assert back == config


def _responses(server: Server) -> dict[str, str]:
    """Every GET route's response about the first experiment, trial, run and checkpoint."""
    uuid = server.get("/experiments/1/checkpoints")["checkpoints"][0]["uuid"]
    ids = {"uuid": uuid, "name": "x"}
    responses = {}
    for path, verbs in server.http.get("/api/v1/openapi.json").json()["paths"].items():
        if "get" not in verbs or path.endswith(("events", "/work", "/directive", "/archive")):
            continue
        filled = path
        for part in verbs["get"].get("parameters", []):
            if part["in"] == "path":
                value = ids.get(part["name"], "1")
                filled = filled.replace("{" + part["name"] + "}", value)
        responses[filled] = server.http.get(filled, params={"name": "file.yaml"}).text
    return responses


def _check_shown(server: Server) -> None:
    responses = _responses(server)
    assert len(responses) > 30
    for path, text in responses.items():
        assert "hush" not in text, path
        assert not re.search(r"passwd\W+4711", text), path


@pytest.mark.needs_extension("media", "metrics_export", "oidc", "submitted_files")
def test_no_route_returns_a_secret(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(**SECRETS)
    server.add_agent()
    run = server.begin()
    server.report(run.run_id, checkpoint(1), validation(1, 0.5))
    server.log(run.run_id, 0, "the key is hush-hush-3", "and hush-hush-4", "passwd: 4711")
    assert run.variables["cpu"]["WANDB_API_KEY"] == "hush-hush-3"
    assert run.config["data"] == SECRETS["data"]
    assert "hush-hush-3" not in json.dumps(run.config)
    server.exit(run.run_id, 1, "login with hush-hush-3 failed", "ValueError: hush-hush-3")
    _check_shown(server)
    logged = [line["text"] for line in server.get("/trials/1/logs")["logs"]]
    assert "the key is ********" in logged


@pytest.mark.needs_extension("submitted_files")
def test_forks_use_the_original_secrets(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(**SECRETS)
    server.add_agent()
    server.report(server.begin().run_id, checkpoint(1))
    submitted = server.get("/experiments/1/submitted")["config"]
    text = json.dumps(submitted | {"name": "changed"})
    server.post("/experiments/1/fork", {"yaml": text})
    server.post("/experiments/1/fork", {"config": {"environment": submitted["environment"]}})
    server.post("/experiments/3/fork", {"config": {"name": "fork of a fork"}})
    server.post("/trials/1/fork", {"config": {"data": submitted["data"]}})
    for (raw,) in server.sql("SELECT raw_config FROM experiments"):
        assert "********" not in raw
        for secret in ("hush-hush-3", "hush-hush-4", '"passwd":4711'):
            assert secret in raw
    for number in (2, 3, 4, 5):
        assert "hush" not in json.dumps(server.experiment(number))


@pytest.mark.needs_extension("continued_experiments", "submitted_files")
def test_continue_keeps_and_hides_secrets(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(**SECRETS, checkpoint_storage={"type": "directory", "container_path": "/tmp/x"})
    server.act("kill")
    submitted = server.get("/experiments/1/submitted")["config"]
    changes = {
        "environment": submitted["environment"],
        "searcher": {"max_length": {"batches": 200}},
    }
    server.post("/experiments/1/continue", {"config": changes})
    assert "hush" not in json.dumps(server.experiment())
    ((raw, stored),) = server.sql("SELECT raw_config, config FROM experiments")
    assert "hush-hush-3" in raw
    assert "hush" not in stored
    assert "********" not in raw
    server.act("kill")
    storage = {**S3, "container_path": None, **KEYS}
    response = server.http.post(
        "/api/v1/experiments/1/continue", json={"config": {"checkpoint_storage": storage}}
    )
    assert response.status_code == 422
    assert "must not change" in response.text
    assert "hush" not in response.text


@pytest.mark.needs_extension("search_preview")
def test_mask_is_no_value(sqlite_server: Server) -> None:
    server = sqlite_server
    masked = mask_secrets(experiment_config(**SECRETS))
    changes = {key: masked[key] for key in SECRETS}
    response = server.try_submit(**changes)
    assert response.status_code == 422
    for path in ("environment.environment_variables.WANDB_API_KEY", "data.login.password"):
        assert path in response.text
    server.submit()
    fork = {"config": {"environment": {"environment_variables": ["NEW_KEY=********"]}}}
    assert server.http.post("/api/v1/experiments/1/fork", json=fork).status_code == 422
    config = experiment_config(**changes)
    server.post("/experiments/preview", {"config": config, "seconds_per_batch": 1})


@pytest.mark.needs_extension("submitted_files")
def test_model_files_show_no_secret(sqlite_server: Server, tmp_path: Path) -> None:
    server = sqlite_server
    config = experiment_config(**SECRETS)
    directory = tmp_path / "packed"
    directory.mkdir()
    (directory / "model_def.py").write_text(
        "import zerotrial\n\n\nclass Trial(zerotrial.ZeroTrial): ...\n"
    )
    (directory / "ds_config.json").write_text('{"train_batch_size": 4}')
    (directory / "file.yaml").write_text(json.dumps(config))
    files = {"archive": ("model.tar.gz", pack(directory))}
    response = server.http.post(
        "/api/v1/experiments", data={"config": json.dumps(config)}, files=files
    )
    assert response.is_success, response.text
    shown = server.http.get("/api/v1/experiments/1/file", params={"name": "file.yaml"}).text
    assert "********" in shown
    assert "hush" not in shown


def test_deleted_secrets_leave_the_database(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(**SECRETS)
    server.submit(name="other")
    server.act("kill")
    path = server.services.orchestrator.home.database

    def holds() -> bool:
        files = (path, path.with_name(f"{path.name}-wal"))
        return any(b"hush-hush-3" in file.read_bytes() for file in files)

    assert holds()
    server.request("DELETE", "/experiments/1")
    server.services.database.empty_wal()
    assert not holds()


def test_reader_delays_emptying_of_the_wal(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(**SECRETS)
    server.act("kill")
    path = server.services.orchestrator.home.database
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM experiments").fetchall()
        server.request("DELETE", "/experiments/1")
        assert server.services.database.deleted
    server.services.database.empty_wal()
    assert not server.services.database.deleted


@pytest.mark.slow
def test_storage_credentials_are_masked_and_used(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(checkpoint_storage=S3 | KEYS, **SECRETS)
    server.add_agent()
    run = server.begin()
    assert run.storage_options["secret_key"] == KEYS["secret_key"]
    assert "hush-hush-2" not in json.dumps(run.config)
    server.report(run.run_id, checkpoint(1), validation(1, 0.5))
    _check_shown(server)
    submitted = server.get("/experiments/1/submitted")["config"]
    server.post("/experiments/1/fork", {"yaml": json.dumps(submitted)})
    server.post("/trials/1/fork", {})
    for (raw,) in server.sql("SELECT raw_config FROM experiments"):
        assert "hush-hush-2" in raw


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"environment_variables": ["A_KEY: hush"]}},
        {"environment": {"environment_variables": {"A_KEY": "hush"}}},
        {"environment": {"environment_variables": "A_KEY=hush"}},
        {"environment": {"environment_variables": [{"A_KEY": "hush"}]}},
        {"environment": {"environment_variables": {"cuda": ["ZEROLAB_TOKEN=hush"]}}},
        {"checkpoint_storage": {**S3, "access_key": "hush", "secret_key": ["hush"]}},
        {"checkpoint_storage": {**S3, "endpoint_url": "http://me:hush@host"}},
        {
            "checkpoint_storage": {
                "type": "azure", "container": "c", "account_url": "https://host/?sig=hush",
            }
        },
        {"entrypoint": ["env", "A_KEY=hush", 3]},
        {"entrypoint": "A_KEY=hush python -m determined.launch.deepspeed x.py --token hush"},
    ],
)  # fmt: skip
def test_errors_contain_no_secret(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(experiment_config(**changes))
    assert "hush" not in str(caught.value)
