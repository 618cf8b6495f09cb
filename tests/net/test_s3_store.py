"""Signed URLs of the S3 store, its credentials, and the error without boto3. Real stores: tests/swarm/.../test_both_stores.py."""

import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from shoal.net.object_store import Declared, upload_headers
from shoal.net.s3_store import Credentials, S3Address, S3Store

KEYS = Credentials(access_key="AKIAIOSFODNN7EXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
SHA256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
LOOPBACK = "s3://rollouts/runs?endpoint=http://127.0.0.1:9000&region=eu-central-1"


def declare(lifetime_s: float = 120.5) -> Declared:
    now_s = time.time()
    return Declared(
        token="token", sha256=SHA256, num_bytes=3, asked_at_s=now_s, expires_at_s=now_s + lifetime_s
    )


def open_store(url: str = LOOPBACK, credentials: Credentials | None = KEYS) -> S3Store:
    return S3Store(S3Address.parse(url), credentials, folder="demo-00")


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_an_upload_url_is_signed_over_size_digest_and_create_only() -> None:
    url = urlsplit(open_store().upload_url(declare()))
    query = parse_qs(url.query)
    assert (url.netloc, url.path) == ("127.0.0.1:9000", "/rollouts/runs/demo-00/token")
    assert query["X-Amz-SignedHeaders"] == ["content-length;host;if-none-match;x-amz-checksum-sha256"]
    assert query["X-Amz-Credential"][0].startswith(f"{KEYS.access_key}/")
    assert query["X-Amz-Credential"][0].endswith("/eu-central-1/s3/aws4_request")
    assert query["X-Amz-Expires"] == ["120"]
    assert upload_headers(SHA256, 3) == {
        "content-length": "3",
        "if-none-match": "*",
        "x-amz-checksum-sha256": "LCa0a2j/xo/5m0U8HTBBNBNCLXBkg7+g+YpeiGJm564=",
    }


def test_other_bytes_need_another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    store, first = open_store(), declare()
    other = Declared(
        token="token",
        sha256="0" * 64,
        num_bytes=3,
        asked_at_s=first.asked_at_s,
        expires_at_s=first.expires_at_s,
    )
    signatures = {
        parse_qs(urlsplit(store.upload_url(one)).query)["X-Amz-Signature"][0] for one in (first, other)
    }
    assert len(signatures) == 2


def test_the_lifetime_of_a_url_has_bounds() -> None:
    for lifetime_s, expected in ((-5.0, "1"), (1e9, str(7 * 24 * 3600))):
        query = parse_qs(urlsplit(open_store().upload_url(declare(lifetime_s))).query)
        assert query["X-Amz-Expires"] == [expected]


def test_amazon_is_addressed_by_bucket_host_and_others_by_path() -> None:
    for address, place in (
        ("s3://rollouts/runs?region=eu-central-1", "https://rollouts.s3.eu-central-1.amazonaws.com/runs/"),
        ("s3://roll.outs?region=eu-central-1", "https://s3.eu-central-1.amazonaws.com/roll.outs/"),
        ("s3://rollouts?endpoint=https://store.example:9000", "https://store.example:9000/rollouts/"),
    ):
        assert open_store(address).read_url(declare()).startswith(f"{place}demo-00/token?")


def test_credentials_from_the_environment(no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROMENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session")
    query = parse_qs(urlsplit(open_store(credentials=None).read_url(declare())).query)
    assert query["X-Amz-Credential"][0].startswith("FROMENV/")
    assert query["X-Amz-Security-Token"] == ["session"]


def test_credentials_from_a_profile(
    no_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "credentials").write_text(
        "[swarm]\naws_access_key_id = FROMPROFILE\naws_secret_access_key = secret\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "swarm")
    assert "FROMPROFILE" in open_store(credentials=None).read_url(declare())


def test_no_credentials_and_a_missing_profile_are_named(
    no_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"AWS_ACCESS_KEY_ID.*AWS_PROFILE.*instance role"):
        open_store(credentials=None)
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(ValueError, match=r"credentials of coordinator\.store: .*nowhere"):
        open_store(credentials=None)


def test_without_boto3_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ValueError, match=r"pip install 'shoal-rl\[s3\]'"):
        open_store()


def test_secrets_are_not_shown() -> None:
    assert "wJalr" not in repr(KEYS)
