"""Presigned requests: the published example, and URLs that botocore makes of the same."""

import pytest

from shoal.net.presign import Credentials, presign, upload_headers

EXAMPLE = Credentials(
    access_key="AKIAIOSFODNN7EXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
)
MAY_2013 = 1369353600  # 20130524T000000Z


def test_the_example_in_amazons_documentation() -> None:
    url = presign(
        EXAMPLE,
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        region="us-east-1",
        now_s=MAY_2013,
        expires_s=86400,
    )
    assert url.endswith("&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404")
    assert "X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request" in url


@pytest.mark.parametrize(
    ("token", "signature"),
    [
        ("", "beff040edd4174dea063223ed1656d1f040ccc7253b2a62fc23aef8b2b6fb63c"),
        ("a+session/token==", "2560c8bfef5d26260124fdfe1a6e2e860667ea8e42190fb2abaa2127d00466f4"),
    ],
)
def test_an_upload_as_botocore_signs_it(token: str, signature: str) -> None:
    credentials = Credentials(
        access_key=EXAMPLE.access_key, secret_key=EXAMPLE.secret_key, session_token=token
    )
    headers = upload_headers("2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae", 3)
    url = presign(
        credentials,
        "PUT",
        "http://127.0.0.1:9000/rollouts/runs/demo-00/token",
        region="eu-central-1",
        now_s=MAY_2013 + 0.9,
        expires_s=120,
        headers=headers,
    )
    assert "X-Amz-SignedHeaders=content-length%3Bhost%3Bif-none-match%3Bx-amz-checksum-sha256" in url
    assert url.rpartition("=")[2] == signature


def test_a_path_of_two_spellings_is_refused() -> None:
    for path in ("/a b", "/a%20b", "/a//b", "/ä"):
        with pytest.raises(ValueError, match="needs encoding"):
            presign(EXAMPLE, "GET", f"https://store.example{path}", region="x", now_s=0, expires_s=1)


def test_secrets_are_not_shown() -> None:
    assert "wJalr" not in repr(EXAMPLE)
