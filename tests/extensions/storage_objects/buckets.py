"""Local S3 server (moto, in a process) that checks credentials."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import httpx
from botocore.config import Config

from tests.waiting import free_port, until
from zerolab.contract.storage import StorageAddress

_NAMES = itertools.count(1)


@dataclass
class S3:
    """S3 server and a user with all rights on buckets."""

    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    key: str = ""
    secret: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it with nothing in it; its user is another one than before."""
        # All requests need a key, except the first four, which create the first user.
        variables = os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": "3"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

        def answers() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/moto-api/").status_code < 500
            return False

        until("the S3 server answers", answers)
        self._make_user()

    def _make_user(self) -> None:
        iam = boto3.client(
            "iam", endpoint_url=self.url, region_name="us-east-1",
            aws_access_key_id="nobody", aws_secret_access_key="nothing",
        )  # fmt: skip
        iam.create_user(UserName="trainer")
        policy = (
            '{"Version": "2012-10-17", "Statement": '
            '[{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
        )
        iam.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=policy)
        access_key = iam.create_access_key(UserName="trainer")["AccessKey"]
        self.key, self.secret = access_key["AccessKeyId"], access_key["SecretAccessKey"]
        iam.close()

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def client(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1",
            aws_access_key_id=self.key, aws_secret_access_key=self.secret,
            config=Config(retries={"max_attempts": 1}),
        )  # fmt: skip

    def bucket(self) -> str:
        """Create a bucket with a unique name; return its name."""
        name = f"bucket-{os.getpid()}-{next(_NAMES)}"
        client = self.client()
        client.create_bucket(Bucket=name)
        client.close()
        return name

    def block(self, bucket: str, prefix: str = "team/checkpoints", **more: Any) -> dict[str, Any]:
        """A block ``checkpoint_storage``."""
        return {
            "type": "s3",
            "bucket": bucket,
            "prefix": prefix,
            "endpoint_url": self.url,
            "access_key": self.key,
            "secret_key": self.secret,
            **more,
        }

    def address(self, bucket: str, prefix: str = "team/checkpoints") -> StorageAddress:
        options = {
            "endpoint_url": self.url,
            "access_key": self.key,
            "secret_key": self.secret,
        }
        return StorageAddress(root=f"s3://{bucket}/{prefix}", options=options)

    def keys(self, bucket: str) -> list[str]:
        """The names of all objects of a bucket."""
        client = self.client()
        objects = client.list_objects_v2(Bucket=bucket).get("Contents", [])
        client.close()
        return sorted(item["Key"] for item in objects)


@contextmanager
def serve_s3(directory: Path) -> Iterator[S3]:
    """Run an S3 until the block ends."""
    directory.mkdir(parents=True, exist_ok=True)
    server = S3(directory / "moto.log")
    try:
        server.start()
        yield server
    finally:
        server.stop()
