"""Certificates that sign themselves, for servers under test."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_certificate(folder: Path, name: str, address: str = "") -> tuple[Path, Path]:
    """A new tls.crt and tls.key, moved over the old ones as in a mounted Secret. address: IP of the
    server, for clients that look at it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    if address:
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    key_bytes = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths = folder / "tls.crt", folder / "tls.key"
    for path, data in zip(paths, (certificate.public_bytes(pem), key_bytes), strict=True):
        new = path.with_suffix(".new")
        new.write_bytes(data)
        new.rename(path)
    return paths
