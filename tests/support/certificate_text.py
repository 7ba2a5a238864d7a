"""A certificate as the terminal shows it."""

from __future__ import annotations

from trillora.certify.certificate import Certificate


def shown(certificate: Certificate) -> str:
    return "\n".join(f"{check.status} {check.part}: {check.name}: {check.what}" for check in certificate.checks)
