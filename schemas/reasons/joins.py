"""Reasons of machines that join: tokens, requests and refusals."""

from typing import Final

from schemas.reasons.reason import ReasonSection, normal, problem

SECTION: Final = ReasonSection(
    title="Join",
    shown_by="fleetctl events",
    reasons=(
        normal("Joined", "A machine or a person got a certificate (event)."),
        normal(
            "Rejoined",
            "A machine with a certificate got a new password and the store's addresses (event).",
        ),
        problem(
            "JoinRequested",
            "",
            "A machine without a token asks to join (event).",
            "Compare its six words and run `fleetctl approve NAME`, or `fleetctl deny NAME`.",
        ),
        problem(
            "JoinRefused",
            "",
            "A join token was refused: unknown, ended, for another name, or asked too often (event).",
            "The message has the sender's address. If it is nobody of yours, look for who can reach the join port. Else "
            "create another token: `fleetctl token create`.",
        ),
        problem(
            "NameTaken",
            "",
            "A machine asked to join under a name that the fleet has, and has not proven to be its holder (event).",
            "A Mac that has lost its key joins with a token for its name (`fleetctl token create --node NAME`), or after "
            "`fleetctl delete node NAME`. If it is nobody of yours, revoke the token that the event is about.",
        ),
    ),
)
