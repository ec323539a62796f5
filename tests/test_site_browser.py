"""The site in a real browser: its switch works, and nothing is wider than a phone."""

import pytest

pytest.importorskip("zensical", reason="the site needs the extra docs")
import build_site
import site_shots

pytestmark = [
    pytest.mark.long,
    pytest.mark.pages,
    pytest.mark.skipif(site_shots.chromium_path() is None, reason="no chromium is on the PATH"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A browser, and the address of a fresh build."""
    folder = tmp_path_factory.mktemp("site")
    assert build_site.build(folder) == []
    with site_shots.served(folder / "html") as address, site_shots.browser() as chromium:
        yield chromium, address, site_shots.pages(folder)


def test_no_page_is_wider_than_a_phone_or_asks_for_what_is_not_there(site):
    chromium, address, pages = site
    tab, said = site_shots.watched(chromium, 390, 844, "light")
    found = {page: faults for page in pages if (faults := site_shots.look_at(tab, address + page))}
    assert len(pages) > 80
    assert (found, said) == ({}, [])


def test_the_switch_goes_from_light_to_dark(site):
    chromium, address, _ = site
    tab, _ = site_shots.watched(chromium, 1280, 900, "light")
    tab.goto(address + "speed/")
    seen = []
    for _ in range(3):
        scheme = tab.evaluate("document.body.getAttribute('data-md-color-scheme')")
        shown = tab.evaluate("[...document.querySelectorAll('article img')].filter(i => i.offsetWidth).map(i => i.src)")
        seen.append((scheme, [address_.partition("#")[2] for address_ in shown]))
        tab.locator("label[for^=__palette]:visible").click()
    assert {("default", ("only-light",)), ("slate", ("only-dark",))} == {
        (scheme, tuple(shown)) for scheme, shown in seen
    }
