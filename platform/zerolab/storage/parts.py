"""A large file on its way to S3: in parts, of which none that has arrived is sent again."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["LARGE", "PartsUpload", "abort_uploads"]

LARGE = 100 * 1024**2
"""Bytes from which on a file goes up in parts."""
_PART = 50 * 1024**2
"""Bytes of a part; more of a file that would have more than :data:`_MOST_PARTS`."""
_MOST_PARTS = 10_000
"""As many as S3 takes."""
_AT_ONCE = 4
_GONE = "NoSuchUpload"


class PartsUpload:
    """One file; :meth:`attempt` may be called until it has succeeded.

    Args:
        files: An s3fs file system.
        path: Where the file goes, with the bucket.
        source: The file, which nobody changes meanwhile.
    """

    def __init__(self, files: Any, path: str, source: Path) -> None:
        bucket, _, key = path.partition("/")
        self._files, self._place = files, {"Bucket": bucket, "Key": key}
        self._source = source
        size = source.stat().st_size
        self._each = max(_PART, -(-size // _MOST_PARTS))
        self._lengths = {
            number: min(self._each, size - first)
            for number, first in enumerate(range(0, size, self._each), start=1)
        }
        self._upload: str | None = None
        self._arrived: dict[int, str] = {}  # number of a part, from 1, to S3's word for its content

    def attempt(self, told: Callable[[int], None]) -> None:
        """Send the parts that are missing, and have S3 make one object of all.

        Args:
            told: Takes how many bytes have arrived, those of earlier attempts too.

        Raises:
            Exception: Whatever the library raises; what has arrived is remembered.
        """
        call = self._files.call_s3
        if self._upload is None:
            self._upload = str(call("create_multipart_upload", **self._place)["UploadId"])
        told(sum(self._lengths[number] for number in self._arrived))
        missing = [number for number in self._lengths if number not in self._arrived]
        try:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                sent = [threads.submit(self._send, number) for number in missing]
                for number, each in zip(missing, sent, strict=True):
                    each.result()
                    told(self._lengths[number])
            parts = [
                {"PartNumber": number, "ETag": tag} for number, tag in sorted(self._arrived.items())
            ]
            call(
                "complete_multipart_upload", **self._place,
                UploadId=self._upload, MultipartUpload={"Parts": parts},
            )  # fmt: skip
        except Exception as error:
            if _GONE in f"{error} {error.__cause__}":  # S3 has forgotten it: from the beginning
                self._upload, self._arrived = None, {}
            raise

    def _send(self, number: int) -> None:
        with self._source.open("rb") as file:
            file.seek((number - 1) * self._each)
            content = file.read(self._lengths[number])
        answer = self._files.call_s3(
            "upload_part", **self._place,
            UploadId=self._upload, PartNumber=number, Body=content,
        )  # fmt: skip
        self._arrived[number] = answer["ETag"]

    def abort(self) -> None:
        """Have S3 forget what has arrived, which costs money; not raised if it does not answer."""
        if self._upload is not None:
            with contextlib.suppress(Exception):  # whoever sweeps the checkpoint asks again
                _abort(self._files, self._place["Bucket"], self._place["Key"], self._upload)


def abort_uploads(files: Any, folder: str) -> None:
    """Have S3 forget the parts of all files below a folder that never became whole.

    Args:
        files: An s3fs file system.
        folder: With the bucket.

    Raises:
        Exception: Whatever the library raises.
    """
    bucket, _, prefix = folder.partition("/")
    while True:
        found = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in found.get("Uploads", ()):
            _abort(files, bucket, upload["Key"], upload["UploadId"])
        if not (found.get("IsTruncated") and found.get("Uploads")):
            return


def _abort(files: Any, bucket: str, key: str, upload: str) -> None:
    files.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
