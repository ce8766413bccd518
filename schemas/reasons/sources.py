"""Reasons of GitSources."""

from typing import Final

from schemas.reasons.reason import ReasonSection, normal, problem

SECTION: Final = ReasonSection(
    title="GitSource: Ready, Reconciling, Stalled",
    shown_by="fleetctl describe gitsource NAME",
    reasons=(
        problem(
            "Unreachable",
            "the Git server does not answer",
            "The Git server does not answer.",
            "Retried by itself. Check the address, the network and the proxy of the leading reconciler.",
        ),
        problem(
            "TimedOut",
            "the fetch took too long",
            "The fetch took longer than `spec.timeout`.",
            "Retried by itself. Raise `spec.timeout` for a large repository.",
        ),
        problem(
            "NoSpace",
            "the disk of --git-dir is full",
            "The disk of `--git-dir` is full.",
            "Free space on the machine of the leading reconciler.",
        ),
        problem(
            "FetchingFailed",
            "the fetch failed",
            "The server's answer is not Git, or the fetch process failed.",
            "Retried by itself. Check `spec.repository`; the reconciler's log has the error.",
        ),
        problem(
            "AuthenticationFailed",
            "the server refuses the credentials",
            "The server refuses the credentials.",
            "Replace the file that `spec.credentials` names, on each machine that may lead.",
        ),
        problem(
            "HostKeyRefused",
            "the server's host key is unknown",
            "The server's SSH host key is not in `knownHostsFile`.",
            "Compare the key with the server's, then add it: `ssh-keyscan HOST`.",
        ),
        problem(
            "CertificateRefused",
            "the server's certificate is not trusted",
            "The server's certificate is not trusted.",
            "Name its authority's file in `spec.credentials.caFile`.",
        ),
        problem(
            "CredentialsRefused",
            "a credentials file is not safe",
            "A file of `spec.credentials` is not bound to the host of the repository, or other users of the Mac may "
            "read it. So it is not sent.",
            "Move it to the folder of that host, or run `chmod 600`, as the message says.",
        ),
        problem(
            "CredentialsMissing",
            "a credentials file is missing",
            "A file of `spec.credentials` is not in `--git-credentials`.",
            "Copy it there, on each machine that may lead.",
        ),
        problem(
            "RepositoryRefused",
            "it reaches beyond its repository's host",
            "The GitSource comes out of a repository, and names a file, a protocol other than https and ssh, or a host in "
            "a private network. Whoever commits there could reach everything that the reconciler's machine reaches.",
            "Apply this GitSource by hand (`fleetctl apply -f FILE`), or use the host of the repository that it comes from.",
        ),
        problem(
            "RepositoryNotFound",
            "there is no such repository",
            "There is no such repository, or the credentials may not read it.",
            "Correct `spec.repository`, or give the key access.",
        ),
        problem(
            "ReferenceNotFound",
            "the branch, tag or commit is missing",
            "The branch, tag or commit does not exist.",
            "Correct `spec.reference`; the message names the nearest one.",
        ),
        problem(
            "PathNotFound",
            "its folder is not in the commit",
            "The folder `spec.path` is not in the commit.",
            "Correct `spec.path`, or commit the folder.",
        ),
        problem(
            "TooLarge",
            "the repository is too large",
            "The repository or a file exceeds the limits of the fetch process.",
            "Move manifests to a smaller repository.",
        ),
        problem(
            "BrokenManifests",
            "the newest commit has errors",
            "The newest commit has errors. The commit before stays applied.",
            "Correct the lines that the message names, and push.",
        ),
        problem(
            "Refused",
            "its manifests conflict with other owners",
            "The manifests conflict with fields that others own. Nothing was written.",
            "Change the manifest, or take the fields over once with `spec.force`.",
        ),
        problem(
            "ApplyFailed",
            "the store refused the objects",
            "The store did not accept the objects.",
            "Retried by itself. Look at etcd: `fleetctl doctor`.",
        ),
        problem(
            "DependencyNotReady",
            "a source it depends on is not ready",
            "A source of `spec.dependsOn` is not Ready.",
            "Correct that source first.",
        ),
        problem(
            "DependencyCircle",
            "its dependsOn forms a cycle",
            "`spec.dependsOn` forms a cycle.",
            "Remove one of the dependencies.",
        ),
        problem(
            "HealthCheckFailed",
            "its objects were not healthy in time",
            "Objects of `spec.healthChecks` were not healthy within `spec.healthTimeout`.",
            "`fleetctl status` shows why they do not serve.",
        ),
        problem(
            "Suspended",
            "it is suspended",
            "`spec.suspend` is set, so nothing is fetched or applied.",
            "`fleetctl resume gitsource/NAME`",
        ),
        normal("Applied", "The newest commit is applied."),
        normal("WaitingForHealth", "The commit is applied; its objects start."),
    ),
)
