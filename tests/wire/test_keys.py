"""Keys: RFC 8032's vectors, private and complete key files, and signatures that are valid for one message only."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from shoal.wire.keys import Key, verify

# RFC 8032, section 7.1, tests 1 and 3.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("seed", "public", "message", "signature"), RFC_8032)
def test_rfc_8032_vectors(seed: str, public: str, message: str, signature: str) -> None:
    key = Key.from_seed(bytes.fromhex(seed))
    assert key.public == public
    assert key.sign(bytes.fromhex(message)) == signature
    assert verify(public, bytes.fromhex(message), signature)


def test_any_changed_bit_of_message_or_signature_is_noticed() -> None:
    key = Key.from_seed(bytes(32))
    message = b"sixteen byte msg"
    signature = bytes.fromhex(key.sign(message))
    for index in range(len(message) * 8):
        changed = bytearray(message)
        changed[index // 8] ^= 1 << (index % 8)
        assert not verify(key.public, bytes(changed), signature.hex())
    for index in range(len(signature) * 8):
        changed = bytearray(signature)
        changed[index // 8] ^= 1 << (index % 8)
        assert not verify(key.public, message, bytes(changed).hex())


@pytest.mark.parametrize("public", ["", "zz" * 32, "ab" * 31, "AB" * 32, "ab" * 32 + "\n"])
def test_a_malformed_public_key_does_not_verify(public: str) -> None:
    assert not verify(public, b"", "00" * 64)


@pytest.mark.parametrize("signature", ["", "xyz", "00" * 63, "00" * 65, "ö"])
def test_a_malformed_signature_does_not_verify(signature: str) -> None:
    assert not verify(Key.from_seed(bytes(32)).public, b"", signature)


def test_load_or_create_makes_a_private_file_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    first = Key.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Key.load_or_create(path).public == first.public
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]


def test_a_missing_key_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="keys folder"):
        Key.load(tmp_path / "trainer.key")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rsa.key"
    path.write_bytes(
        generate_private_key(public_exponent=65537, key_size=1024).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(ValueError, match="not an Ed25519 private key"):
        Key.load(path)
