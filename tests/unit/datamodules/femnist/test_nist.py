"""NIST SD 19: who wrote what is found by the digests of files, in zips and folders alike; what is broken is refused."""

import io
import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from lightning_fed.datamodules.femnist import nist
from lightning_fed.datamodules.femnist.characters import ALPHABET, DataError, build

#: writer -> what it wrote; every image is another one
WROTE = {"f0000_14": "0Aa9", "f0001_41": "zZ5", "f0500_03": "m"}


def drawing(seed: int, side: int = 128, mode: str = "RGB") -> bytes:
    """A PNG with some ink on white paper."""
    image = Image.new("L", (side, side), 255)
    points = np.random.default_rng(seed).integers(side // 4, side * 3 // 4, size=(5, 2))
    ImageDraw.Draw(image).line([tuple(map(int, point)) for point in points], fill=0, width=max(1, side // 20))
    file = io.BytesIO()
    image.convert(mode).save(file, "PNG")
    return file.getvalue()


def sd19() -> dict[str, bytes]:
    """The files of a small SD 19, by their paths."""
    files, seed = {}, 0
    for k, (writer, text) in enumerate(WROTE.items()):
        for character in text:
            seed += 1
            part, code, data = f"hsf_{k}", f"{ord(character):02x}", drawing(seed)
            files[f"by_class/{code}/{part}/{part}_{seed:05d}.png"] = data
            files[f"by_write/{part}/{writer}/c{writer[1:]}/c{writer[1:]}_{seed:05d}.png"] = data
    return files


def lay(folder: Path, files: dict[str, bytes], zipped: tuple[str, ...] = ("by_class", "by_write")) -> Path:
    folder.mkdir(exist_ok=True)
    for name in zipped:
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in reversed([path for path in files if path.startswith(name)]):
                archive.writestr(path, files[path])
    for path, data in files.items():
        if path.split("/")[0] not in zipped:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return folder


def texts(path: Path) -> dict[str, str]:
    return {block.writer: "".join(ALPHABET[label] for label in block.labels) for block in nist.read(path)}


@pytest.mark.parametrize("zipped", [(), ("by_class",), ("by_write",), ("by_class", "by_write")])
def test_each_writer_gets_the_labels_of_by_class_from_zips_and_folders(tmp_path: Path, zipped: tuple[str, ...]) -> None:
    assert texts(lay(tmp_path / "sd19", sd19(), zipped)) == WROTE


def test_all_62_class_folders_are_labelled_in_the_order_of_leaf(tmp_path: Path) -> None:
    codes = [f"{code:02x}" for span in ((0x30, 0x3A), (0x41, 0x5B), (0x61, 0x7B)) for code in range(*span)]
    files = {}
    for k, code in enumerate(codes):
        files[f"by_class/{code}/hsf_0/x.png"] = files[f"by_write/hsf_0/f0000_14/c/{k:02d}.png"] = drawing(k)
    (block,) = nist.read(lay(tmp_path / "sd19", files))
    assert block.labels.tolist() == list(range(62))


def test_pixels_are_those_of_pillow_with_white_paper(tmp_path: Path) -> None:
    first = next(nist.read(lay(tmp_path / "sd19", sd19())))
    image = Image.open(io.BytesIO(drawing(1))).convert("L")
    image.thumbnail((28, 28), Image.LANCZOS)
    assert first.images.dtype == np.uint8
    assert first.images[0].tolist() == list(image.tobytes())
    assert first.images[0].reshape(28, 28)[0, 0] == 255
    assert np.median(first.images[0]) == 255
    assert first.images[0].min() < 50


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_images_of_any_mode_become_grey(mode: str) -> None:
    assert nist.pixels(drawing(1, mode=mode), "x").tolist() == nist.pixels(drawing(1, mode="L"), "x").tolist()


def test_an_image_of_28_pixels_stays_as_it_is() -> None:
    data = drawing(1, side=28, mode="L")
    assert nist.pixels(data, "x").tolist() == list(Image.open(io.BytesIO(data)).tobytes())


@pytest.mark.parametrize("size", [(20, 20), (128, 64)])
def test_an_image_that_is_small_or_not_square_is_refused(size: tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.new("L", size).save(file, "PNG")
    with pytest.raises(DataError, match=f"here: wanted a square image of at least 28x28.*got {size[0]}x{size[1]}"):
        nist.pixels(file.getvalue(), "here")


def test_the_cache_holds_what_was_read(tmp_path: Path) -> None:
    path = lay(tmp_path / "sd19", sd19())
    built = build(tmp_path / "cache", nist.read(path), source="SD 19", fingerprint="1")
    assert built.writers == list(WROTE)
    for k, block in enumerate(nist.read(path)):
        rows = built.rows(k)
        assert built.images[rows].tolist() == block.images.tolist()
        assert built.labels[rows].tolist() == block.labels.tolist()


def test_a_writer_in_two_parts_is_one_writer(tmp_path: Path) -> None:
    files = sd19()
    for code, seed in (("30", 90), ("7a", 91)):
        files[f"by_class/{code}/hsf_7/{seed}.png"] = files[f"by_write/hsf_7/f0000_14/d/{seed}.png"] = drawing(seed)
    built = build(tmp_path / "cache", nist.read(lay(tmp_path / "sd19", files)), source="SD 19", fingerprint="1")
    assert built.writers == list(WROTE)
    assert [len(built.rows(k)) for k in range(3)] == [6, 3, 1]


def test_an_image_that_was_written_twice_counts_twice_and_its_first_class_wins(tmp_path: Path) -> None:
    files = sd19()
    files["by_write/hsf_2/f0500_03/c0500_03/again.png"] = files["by_class/6e/hsf_2/again.png"] = drawing(8)
    assert texts(lay(tmp_path / "sd19", files))["f0500_03"] == "mm"


def test_images_without_a_class_are_left_out_with_a_warning(tmp_path: Path) -> None:
    files = sd19() | {"by_write/hsf_0/f0000_14/c/x.png": drawing(77), "by_write/hsf_0/f0099_14/c/y.png": drawing(78)}
    path = lay(tmp_path / "sd19", files)
    with pytest.warns(UserWarning, match=r"2 images of by_write are not in by_class .* hsf_0/f0000_14/c/x.png"):
        assert texts(path) == WROTE


@pytest.mark.parametrize("part", ["train_30", "hsf_0.mit"])
def test_only_hsf_folders_of_by_class_count(tmp_path: Path, part: str) -> None:
    files = sd19() | {f"by_class/30/{part}/x.png": drawing(77), "by_write/hsf_0/f0000_14/c/x.png": drawing(77)}
    with pytest.warns(UserWarning, match="1 images of by_write are not in by_class"):
        assert texts(lay(tmp_path / "sd19", files)) == WROTE


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    more = ("by_class/.DS_Store", "by_class/30/hsf_0.mit", "by_write/hsf_0/notes.txt", "by_write/hsf_0/stray.png")
    assert texts(lay(tmp_path / "sd19", sd19() | dict.fromkeys(more, b"?"))) == WROTE


def test_nothing_matched_is_refused(tmp_path: Path) -> None:
    files = {path: data + b" " * path.startswith("by_write") for path, data in sd19().items()}
    with pytest.raises(
        DataError, match=r"sd19: none of the 8 images of by_write is among the 8 of by_class.*same edition"
    ):
        texts(lay(tmp_path / "sd19", files))


@pytest.mark.parametrize("code", ["7f", "40", "zz", "0x41"])
@pytest.mark.parametrize("zipped", [(), ("by_class",)])
def test_an_unknown_class_folder_is_refused(tmp_path: Path, code: str, zipped: tuple[str, ...]) -> None:
    files = sd19() | {f"by_class/{code}/hsf_0/x.png": drawing(77)}
    with pytest.raises(DataError, match=f"by_class/{code}: is no class of NIST SD 19.*30 to 7a"):
        texts(lay(tmp_path / "sd19", files, zipped))


@pytest.mark.parametrize("name", ["by_class", "by_write"])
def test_a_missing_archive_is_named_with_where_to_get_it(tmp_path: Path, name: str) -> None:
    path = lay(tmp_path / "sd19", {file: data for file, data in sd19().items() if name not in file}, ())
    with pytest.raises(DataError, match=rf"neither {name}.zip nor a folder {name}/. Get https://.*SD19/{name}.zip"):
        texts(path)


@pytest.mark.parametrize("name", ["by_class", "by_write"])
def test_a_truncated_zip_is_refused(tmp_path: Path, name: str) -> None:
    file = lay(tmp_path / "sd19", sd19()) / f"{name}.zip"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{name}.zip: is not a whole zip file.*download it anew"):
        texts(file.parent)


def test_a_zip_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    file = lay(tmp_path / "sd19", sd19()) / "by_write.zip"
    data = bytearray(file.read_bytes())
    data[200] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"by_write.zip: by_write/hsf_\S+png is damaged.*download it anew"):
        texts(file.parent)


@pytest.mark.parametrize(
    "name", ["../by_class/x.png", "by_class/30/../../x", "/by_class/x.png", "..\\by_class", "C:\\by_class"]
)
def test_a_zip_member_that_escapes_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = lay(tmp_path / "sd19", sd19())
    with zipfile.ZipFile(path / "by_class.zip", "a") as archive:
        archive.writestr(name, drawing(77))
    with pytest.raises(DataError, match=r"by_class.zip: member .* escapes its folder"):
        texts(path)
    assert sorted(os.listdir(tmp_path)) == ["sd19"]


@pytest.mark.parametrize("data", [b"", b"not a picture", drawing(1)[:60], drawing(1)[:200]])
def test_a_png_that_cannot_be_decoded_is_named_with_its_writer(tmp_path: Path, data: bytes) -> None:
    files = sd19() | {"by_class/30/hsf_0/x.png": data, "by_write/hsf_0/f0000_14/c/x.png": data}
    with pytest.raises(DataError, match=r"by_write/hsf_0/f0000_14/c/x.png, writer 'f0000_14': cannot be decoded"):
        texts(lay(tmp_path / "sd19", files))


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder quietly; breaks off in the middle of a file whose name is in ``broken``."""

    broken: tuple[str, ...] = ()

    def log_message(self, *_: object) -> None: ...

    def copyfile(self, source: io.BufferedReader, outputfile: io.BufferedWriter) -> None:  # type: ignore[override]
        data = source.read()
        outputfile.write(data[: len(data) // 2] if self.path.endswith(self.broken) else data)


class Broken(Handler):
    broken = ("by_write.zip",)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(handler: type[Handler]) -> str:
        folder = lay(tmp_path / "served", sd19())
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_both_zips_are_downloaded_and_can_be_read(tmp_path: Path, serve) -> None:
    nist.download(tmp_path / "new" / "sd19", serve(Handler))
    assert sorted(os.listdir(tmp_path / "new" / "sd19")) == ["by_class.zip", "by_write.zip"]
    assert texts(tmp_path / "new" / "sd19") == WROTE


def test_what_is_there_is_not_downloaded_again(tmp_path: Path) -> None:
    path = lay(tmp_path / "sd19", sd19(), ("by_class",))
    before = (path / "by_class.zip").read_bytes()
    nist.download(path, "http://127.0.0.1:1")
    assert sorted(os.listdir(path)) == ["by_class.zip", "by_write"]
    assert (path / "by_class.zip").read_bytes() == before


def test_a_connection_that_breaks_leaves_nothing_half(tmp_path: Path, serve) -> None:
    url = serve(Broken)
    with pytest.raises(DataError, match=rf"{url}/by_write.zip: \d+ bytes came that are no whole zip file.*by hand"):
        nist.download(tmp_path / "sd19", url)
    assert os.listdir(tmp_path / "sd19") == ["by_class.zip"]


def test_an_interrupt_leaves_nothing_half(tmp_path: Path, serve, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(torch.hub.tqdm):
        def update(self, n: float | None = 1) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.hub, "tqdm", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        nist.download(tmp_path / "sd19", serve(Handler))
    assert os.listdir(tmp_path / "sd19") == []


def test_a_page_that_is_not_there_is_named(tmp_path: Path, serve) -> None:
    url = serve(Handler)
    with pytest.raises(DataError, match=f"{url}/nowhere/by_class.zip: could not be downloaded .*404"):
        nist.download(tmp_path / "sd19", f"{url}/nowhere")
    assert os.listdir(tmp_path / "sd19") == []


def test_without_network_the_error_says_which_file_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    target = tmp_path / "sd19" / "by_class.zip"
    with pytest.raises(
        DataError, match=f"http://127.0.0.1:1/by_class.zip: could not .* by hand and put it at {target}"
    ):
        nist.download(tmp_path / "sd19", "http://127.0.0.1:1")
    assert os.listdir(tmp_path / "sd19") == []
