"""Sums under masks: the bits of the simulation, and no single site's numbers at the coordinator."""

from __future__ import annotations

import gc
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from msgspec.structs import replace

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.sparse import TopK
from medfed.federation.wire.fixed_point import FixedPoint
from medfed.federation.wire.packet import EncodedPart, Packet
from medfed.sites.agreement import Agreed
from medfed.sites.attendance import Attendance, SitesProgress
from medfed.sites.calls import Caller, Terms, agree_on_data, greet
from medfed.sites.coordinator import Coordinator
from medfed.sites.deploying import encoded, start_site
from medfed.sites.masks import Certificate, Half, context_of, needed, unmasked
from medfed.sites.policy import COUNTED
from medfed.sites.run import SitesModule
from medfed.sites.site import Site
from medfed.sites.wire import Fit, Keys, Reply, Request
from medfed.standalone.errors import CodecError, SiteError
from tests.contract.harness import algorithm, federation
from tests.integration.runs import CLINICAL, run
from tests.sites.direct import Direct
from tests.sites.faults import Faulty, is_at, once
from tests.sites.hospitals import IMPATIENT, QUICK, across, direct, same
from tests.sites.tables import EXPERIMENT, write_table
from tests.sites.toy_sites import Toy, fit, nothing, opened
from tests.toys import toy_data

ROUNDS = 2


def secure(name: str, lossy_down: bool = False) -> Channel:
    """A channel that sums what the method averages."""
    method = algorithm(name)
    parts = tuple(p for p in method.parts_sent if p in method.parts_averaged)
    down = Link(TopK(0.3)) if lossy_down else None
    return Channel(down=down, sums=FixedPoint(parts))


class Masking:
    """Sites whose sums are under masks, and their coordinator."""

    def __init__(self, folder: Path, method: str, lossy: bool = False, sites: int = 5) -> None:
        self.names, self.folder, self.method = [f"c{n}" for n in range(sites)], folder, method
        self.lossy = lossy
        self.places = {c: Toy(c, method, self.settings) for c in self.names}
        self.direct = Direct({c: Site(self.places[c], folder / c) for c in self.names})
        self.transport = Faulty(self.direct)

    def settings(self, **more):
        data = toy_data(len(self.names), batch=4)
        return {"channel": secure(self.method, self.lossy), "data": data, **more}

    def module(self, terms: Terms = QUICK) -> SitesModule:
        caller = opened(Caller(self.transport, self.names, terms))
        greet(caller)
        facts, answers, _ = agree_on_data(caller, nothing())
        task, fed, local = federation(self.method, **self.settings())
        fed.clients = {}
        attendance = Attendance(caller, fed, facts, answers, "job", SitesProgress.new(fed.ids))
        attendance.begin()
        return SitesModule(task, fed, local, Coordinator(attendance))

    def run(self, terms: Terms = QUICK) -> SitesModule:
        module = self.module(terms)
        fit(module, self.folder / "server", ROUNDS)
        return module

    def simulated(self, absent=None):
        cohort = Cohort(absent=absent or {})
        return run_reference(federation(self.method, **self.settings(cohort=cohort))[1], ROUNDS)


@pytest.mark.parametrize(
    ("method", "lossy"),
    [("fedavg", False), ("fedper", True), ("scaffold", False), ("pfednet", True)],
)
def test_equal_to_the_simulation(method, lossy, tmp_path: Path):
    """Of pFedNet the other parts travel as ever; downwards codecs may lose."""
    federated = Masking(tmp_path, method, lossy)
    module, expected = federated.run(), federated.simulated()
    assert not module.coordinator.progress.left_out  # first, as it would explain the rest
    assert module.coordinator.digests(ROUNDS) == expected.digests()
    assert module.federation.ledger.to_csv() == expected.ledger.to_csv()


def test_a_whole_run_equals_the_ordinary_one(tmp_path: Path):
    """From the command's keys to the files of the run folder."""
    keys = (*CLINICAL, "algorithm=fedavg", "channel.secure=masks", "partition.num_clients=3")
    _, experiment = run(tmp_path / "simulation", *keys)
    names = list(experiment.data.clients)
    across(tmp_path / "server", direct(tmp_path / "sites", names, *keys), names, *keys)
    assert not same(tmp_path / "simulation", tmp_path / "server")
    kinds = (tmp_path / "server" / "traffic.csv").read_text()
    assert all(f",{kind}," in kinds for kind in ("keys", "shares", "unmask"))


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_site_that_is_lost_after_its_keys_is_left_out_of_the_sum(method, tmp_path: Path):
    """The others train once; the result is that of a simulation without it in this round."""
    federated = Masking(tmp_path, method, lossy=method == "fedavg")
    federated.transport.deaf = is_at("fit", "c3", 1)
    module = federated.run()
    expected = federated.simulated({1: ["c3"]})
    assert module.coordinator.progress.absent == {1: ["c3"]}
    assert module.coordinator.digests(ROUNDS) == expected.digests()
    assert module.federation.ledger.to_csv() == expected.ledger.to_csv()
    fits = [r for r in federated.transport.seen if (r.kind, r.round, r.site) == ("fit", 1, "c0")]
    assert len(fits) == 1


def test_a_sum_is_unmasked_without_the_shares_of_some(tmp_path: Path):
    """Four of five are enough; three are not, and the round starts again with other keys."""
    federated = Masking(tmp_path, "fedavg")
    federated.transport.deaf = is_at("unmask", "c1", 0)
    module = federated.run()
    assert module.coordinator.digests(ROUNDS) == federated.simulated().digests()
    keys = {(r.attempt, str(r.keys)) for r in federated.transport.seen if r.kind == "shares"}
    assert len(keys) == ROUNDS


def test_two_attempts_of_a_round_reveal_nothing(tmp_path: Path):
    """A second sum of a round is refused by each site, also after all have been restarted."""
    federated = Masking(tmp_path, "fedavg")
    federated.run()
    restarted = Direct({c: Site(federated.places[c], tmp_path / c) for c in federated.names})
    federated.transport = Faulty(restarted)
    coordinator = federated.module(IMPATIENT).coordinator
    coordinator.attendance.planned = Cohort(clients=federated.names[:4])
    federated.transport.seen.clear()
    with pytest.raises(SiteError, match="it has given its share to a sum of other sites"):
        coordinator.round(0)
    refused = [r for r in federated.transport.seen if r.kind == "unmask"]
    assert {r.site for r in refused} == {*federated.names[:4]}
    assert (tmp_path / "c0" / COUNTED).is_file()


def test_a_sum_that_was_given_stays_the_only_one(tmp_path: Path):
    """A site is lost after it: the round waits for exactly these sites, and is the same then."""
    federated = Masking(tmp_path, "fedavg")
    asked = is_at("commit", "c2", 0)
    federated.transport.deaf, federated.transport.lose = once(asked), once(asked)
    module = federated.run()
    assert module.coordinator.digests(ROUNDS) == federated.simulated().digests()
    assert not module.coordinator.progress.absent
    federated = Masking(tmp_path / "gone", "fedavg")
    federated.transport.deaf = _gone_after_the_sum()
    with pytest.raises(
        SiteError, match="Round 1 has a sum of c0, c1, c2, c3, c4, and one of fewer"
    ):
        federated.run(IMPATIENT)


def test_a_site_lost_in_a_later_phase_holds_the_round_up(tmp_path: Path, caplog):
    """After the sum of an earlier phase; the round is the same once the site is back."""
    federated = Masking(tmp_path, "pfednet")
    lost = is_at("fit", "c3", 1, 2)
    federated.transport.deaf = lambda r: lost(r) and r.attempt == 0
    module = federated.run()
    assert {r.attempt for r in federated.transport.seen if r.round == 1} == {0, 1}
    assert not module.coordinator.progress.absent
    assert module.coordinator.digests(ROUNDS) == federated.simulated().digests()
    assert "PFedNet has several phases in a round: if a site is lost after" in caplog.text


def _gone_after_the_sum():
    done = []

    def rule(asked: Request) -> bool:
        if asked.site == "c2" and asked.kind == "commit":
            done.append(asked)
        return asked.site == "c2" and bool(done)

    return rule


def test_fewer_than_three_sites_are_refused(tmp_path: Path):
    federated = Masking(tmp_path, "fedavg", sites=3)
    federated.transport.deaf = lambda r: (
        r.site == "c2" and r.kind not in ("hello", "agree", "begin")
    )
    with pytest.raises(SiteError, match="Round 1 needs 3 of its 3 sites"):
        federated.run(IMPATIENT)
    site = federated.direct.sites["c0"]
    where = {"round": 0, "attempt": 9}
    asked = Keys("c0", site.gate.session, **where, cohort=["c0", "c1"])
    reply = Reply.from_bytes(site.answer(asked.to_bytes()))
    assert (reply.status, reply.reason) == ("refused", "message")
    plain = Fit("c0", site.gate.session, **where, cohort=federated.names)
    sent = next(r for r in federated.transport.seen if r.kind == "fit" or r.kind == "keys")
    assert sent.kind == "keys"  # nobody has trained, so nobody has sent anything
    assert Reply.from_bytes(site.answer(plain.to_bytes())).status != "ok"


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "plain"])
def test_the_coordinator_holds_no_single_sites_numbers(masks, tmp_path: Path):
    """Not among its objects while it sums, nor on disk; without masks the same search finds all."""
    federated = Masking(tmp_path, "fedavg")
    if not masks:
        federated.settings = lambda: {"data": toy_data(5, batch=4)}  # type: ignore[method-assign]
        federated.places = {c: Toy(c, "fedavg", federated.settings) for c in federated.names}
        federated.direct.sites = {c: Site(p, tmp_path / c) for c, p in federated.places.items()}
    secrets: dict[bytes, str] = {}
    for name, place in federated.places.items():
        place.join = _noting(place.join, name, secrets)  # type: ignore[method-assign]
    module, seen = federated.module(), set[str]()
    coordinator = module.coordinator
    check, looks = coordinator.requests.check_sizes, []

    def look(*replies) -> None:
        tracked = gc.get_objects()
        near = [v for o in tracked for v in gc.get_referents(o)]
        # The collector does not follow a dictionary that holds bytes alone.
        flat = [v for o in near if not gc.is_tracked(o) for v in gc.get_referents(o)]
        for value in [*tracked, *near, *flat]:
            data = _bytes_of(value)
            seen.update(who for secret, who in secrets.items() if secret[::-1] in data)
        looks.append(len(tracked))
        check(*replies)

    coordinator.requests.check_sizes = look  # type: ignore[method-assign]
    fit(module, tmp_path / "server", 1)
    assert len(secrets) == 5
    assert looks
    assert seen == (set() if masks else {*federated.names})
    for path in (tmp_path / "server").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not any(secret[::-1] in data for secret in secrets)


def _noting(join, name: str, secrets: dict[bytes, str]):
    """Notes numbers that a site would send without masks, backwards: the search finds others."""

    def joined(everyone):
        module = join(everyone)
        encode = module.federation.channel.encode

        def noted(message, direction, *more):
            packet, memory = encode(message, direction, *more)
            if direction == "up":
                secrets[packet.parts["shared"].data[16:32][::-1]] = name
            return packet, memory

        module.federation.channel.encode = noted
        return module

    return joined


def _bytes_of(value: object) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return value.tobytes()
    if type(value) is torch.Tensor and value.is_floating_point() and value.layout == torch.strided:
        return value.detach().numpy().tobytes()
    return b""


def halves(names: list[str]) -> tuple[dict[str, Half], dict, dict]:
    asked = Keys("a", "session", 0, 0, 0, cohort=[])
    made = {c: Half(c, asked, names, None) for c in names}
    keys = {c: half.announced() for c, half in made.items()}
    return made, keys, {c: half.boxes(keys) for c, half in made.items()}


@pytest.mark.parametrize(("count", "lost"), [(3, 0), (4, 1), (7, 2)])
def test_masks_cancel_in_the_sum(count, lost):
    names = [f"s{n}" for n in range(count)]
    made, keys, boxes = halves(names)
    sums, rng = FixedPoint(("w",)), np.random.default_rng(0)
    plain, masked = [], []
    for name in names[lost:]:
        tensors = {"w": torch.from_numpy(rng.normal(size=50))}
        data = sums.encode(tensors, 1 / count)[0]
        packet = Packet("fit", {}, {"w": EncodedPart("update", data, (("w", (50,), "float64"),))})
        to = {other: given[name] for other, given in boxes.items() if other != name}
        sent = made[name].masked(sums, packet, to)
        plain.append(sums.read(packet))
        masked.append(sums.read(sent))
        assert not np.any(masked[-1] == plain[-1])
    there = names[lost:]
    shares = {c: made[c].shares(there) for c in there[: needed(count)]}
    context = context_of(Keys("a", "session", 0, 0, 0, cohort=[]), names)
    rest = unmasked(context, keys, there, shares, 50)
    assert np.array_equal(np.sum(masked, 0, np.uint32) + rest, np.sum(plain, 0, np.uint32))
    few = dict(list(shares.items())[1:])
    with pytest.raises(ValueError, match="do not fit together"):
        unmasked(context, keys, there, few, 50)
    with pytest.raises(CodecError):
        made[there[0]].shares(names[:2])


def kit(folder: Path, name: str, root: tuple) -> Path:
    """A certificate as in a site's kit."""
    key, certificate = signed(name, root)
    folder.mkdir(parents=True)
    for file, one in (("client.crt", certificate), ("rootCA.pem", root[1])):
        (folder / file).write_bytes(one.public_bytes(serialization.Encoding.PEM))
    how = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (folder / "client.key").write_bytes(key.private_bytes(*how))
    return folder


def certificate(folder: Path, name: str, root: tuple) -> Certificate:
    return Certificate(kit(folder, name, root), folder / "certificates.json")


def signed(name: str, root: tuple | None = None) -> tuple:
    """A key and its certificate, by a root or by itself."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        root[1].subject if root else subject,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        now - timedelta(days=1),
        now + timedelta(days=1),
    )
    return key, made.sign(root[0] if root else key, hashes.SHA256())


@pytest.mark.parametrize("is_link", [False, True])
def test_a_site_signs_also_where_its_file_is_a_link(is_link, tmp_path: Path):
    """A link to /etc left the keys of masks unsigned without a word."""
    kit(tmp_path / "kit" / "startup", "Basel", signed("root"))
    write_table(tmp_path / "ours.csv", ("Basel",))
    file = tmp_path / "kit" / "local" / "medfed.yaml"
    real = tmp_path / "etc" / "medfed.yaml" if is_link else file
    file.parent.mkdir()
    real.parent.mkdir(exist_ok=True)
    real.write_text(f"site: Basel\nfolder: ours\ndata: {{path: {tmp_path / 'ours.csv'}}}\n")
    if is_link:
        file.symlink_to(real)
    agreed = encoded(Agreed(("Basel",), EXPERIMENT[:-2]).record())
    site = start_site(file, agreed, "Basel", print, print)
    assert site.signer is not None


def test_keys_are_those_of_the_sites_certificates(tmp_path: Path):
    """Neither unsigned keys, nor those of another site, sum or root are accepted."""
    root, names = signed("root"), ["a", "b", "c"]
    signers = {c: certificate(tmp_path / c, c, root) for c in names}
    asked = Keys("a", "session", 0, 0, 0, cohort=[])
    made = {c: Half(c, asked, names, signers[c]) for c in names}
    keys = {c: half.announced() for c, half in made.items()}
    assert sorted(made["a"].boxes(keys)) == ["b", "c"]
    other = Half("b", replace(asked, attempt=1), names, signers["b"]).announced()
    foreign = certificate(tmp_path / "foreign", "b", signed("root"))
    for bad in (
        Half("b", asked, names, None).announced(),
        Half("b", asked, names, signers["c"]).announced(),
        Half("b", asked, names, foreign).announced(),
        other,
        replace(keys["b"], mask=other.mask),
        replace(keys["b"], samples=10**9),  # by which many numbers seemed to be of many patients
    ):
        with pytest.raises(CodecError, match="keys of b are not signed by its certificate"):
            made["a"].boxes({**keys, "b": bad})


def test_a_site_keeps_to_the_certificates_that_it_has_seen_first(tmp_path: Path):
    """Whoever holds the root's key makes one in b's name: a refuses it, also after a restart."""
    root, names = signed("root"), ["a", "b", "c"]
    signers = {c: certificate(tmp_path / c, c, root) for c in names}
    second = certificate(tmp_path / "second", "b", root)

    def sum_of(attempt: int, signers: dict[str, Certificate]) -> dict[str, str]:
        asked = Keys("a", "session", 0, attempt, 0, cohort=[])
        made = {c: Half(c, asked, names, signers[c]) for c in names}
        return made["a"].boxes({c: half.announced() for c, half in made.items()})

    for attempt in range(2):
        assert sorted(sum_of(attempt, signers)) == ["b", "c"]
    restarted = {**signers, "a": Certificate(tmp_path / "a", tmp_path / "a/certificates.json")}
    with pytest.raises(CodecError, match="b has another certificate than before") as error:
        sum_of(2, {**restarted, "b": second})
    assert str(tmp_path / "a/certificates.json") in str(error.value)
    assert sorted(sum_of(3, restarted)) == ["b", "c"]
    known = json.loads((tmp_path / "a/certificates.json").read_text())
    del known["b"]
    (tmp_path / "a/certificates.json").write_text(json.dumps(known))
    assert sorted(sum_of(4, {**restarted, "b": second})) == ["b", "c"]


def test_keys_that_were_changed_on_the_way_are_refused():
    names = ["a", "b", "c"]
    made, keys, boxes = halves(names)
    _, others, _ = halves(names)
    with pytest.raises(CodecError, match="of another sum"):
        made["a"].boxes({**keys, "a": others["a"]})
    with pytest.raises(CodecError, match="not those of all sites"):
        made["a"].boxes({**keys, "b": keys["c"]})
    packet = Packet("fit", {}, {})
    to = {other: given["a"] for other, given in boxes.items() if other != "a"}
    with pytest.raises(CodecError, match="was not encrypted by its site"):
        made["a"].masked(FixedPoint(("w",)), packet, {**to, "b": to["c"]})
