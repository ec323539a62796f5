"""The site in a real browser: its switch works, its search finds answers, and nothing is wider than a phone."""

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


RESULTS = """() => {
  const found = [], look = node => {
    for (const child of node.children ?? []) {
      if (child.tagName === 'A' && child.href.includes('?h=')) found.push(child.getAttribute('href'));
      look(child);
    }
    if (node.shadowRoot) look(node.shadowRoot);
  };
  look(document.body);
  return found;
}"""


@pytest.fixture(scope="module")
def search(site):
    """What the search of the site finds, as addresses below the site's own, best first."""
    chromium, address, _ = site
    tab, _ = site_shots.watched(chromium, 1280, 900, "light")
    tab.goto(address)
    tab.locator("button.md-search__button").click()

    def found(query: str) -> list[str]:
        tab.locator("input:focus").fill("")  # else links of the last query are there until the answer comes
        tab.wait_for_function(f"({RESULTS})().length === 0")
        tab.locator("input:focus").fill(query)
        tab.wait_for_function(f"({RESULTS})().length > 0")
        return [link.removeprefix(address) for link in tab.evaluate(RESULTS)]

    return found


@pytest.mark.parametrize(
    ("query", "anchor"),
    [
        ("out of memory", "out-of-memory-on-the-gpu-cuda-oom"),
        ("OOM", "out-of-memory-on-the-gpu-cuda-oom"),
        ("CUDA out of memory", "out-of-memory-on-the-gpu-cuda-oom"),
        ("resume after crash", "how-do-i-resume-after-a-crash-or-after-sigterm"),
        ("NaN", "nan-my-loss-is-not-a-number"),
        ("loss spike", "loss-spike-the-loss-rises-at-once-and-stays-high"),
        ("slow", "too-slow-why-does-training-take-longer-than-it-should"),
        ("too slow", "too-slow-why-does-training-take-longer-than-it-should"),
        ("preempted", "my-job-was-preempted-are-its-steps-lost"),
        ("multi node", "multi-node-how-do-i-train-on-several-hosts-such-as-with-slurm"),
        ("wandb", "wandb-mlflow-or-comet-how-do-i-log-there"),
        ("how do I use my own tokenizer", "how-do-i-use-my-own-tokenizer"),
        ("does 7B fit", "does-7b-fit-how-much-memory-does-a-model-need"),
        ("how much memory do I need?", "does-7b-fit-how-much-memory-does-a-model-need"),
        ("my loss is nan", "nan-my-loss-is-not-a-number"),
        ("gpu out of memory", "out-of-memory-on-the-gpu-cuda-oom"),
        ("how do i resume", "how-do-i-resume-after-a-crash-or-after-sigterm"),
        ("change the learning rate of a resumed run", "how-do-i-change-the-learning-rate-of-a-resumed-run"),
        ("which batch size", "which-batch-size"),
        ("why is my training slow", "too-slow-why-does-training-take-longer-than-it-should"),
        ("the loss does not go down", "the-loss-does-not-fall-or-goes-down-too-little"),
    ],
)
def test_the_search_leads_to_questions_first(search, query, anchor):
    page, _, found = search(query)[0].partition("#")
    assert (page.partition("?")[0], found) == ("questions/", anchor)


@pytest.mark.parametrize(("query", "page"), [("StepGuard", "step_guard/"), ("EMA", "reference/callbacks/EMA/")])
def test_the_search_leads_from_a_class_to_its_page(search, query, page):
    assert page in [link.partition("?")[0] for link in search(query)[:4]]


CODE = """() => [...document.querySelectorAll('.highlight pre > code')].map(code => {
  const box = code.getBoundingClientRect(), button = code.parentElement.querySelector('.md-code__nav');
  const covered = !button || button.getBoundingClientRect().left < box.right;
  code.setAttribute('data-md-copying', '');  // as the theme does when it copies
  const copied = code.innerText.trimEnd() === code.textContent.trimEnd();
  code.removeAttribute('data-md-copying');
  const columns = code.closest('.language-text');
  const wraps = (innerWidth > 900 && !columns) || code.closest('.language-bash, .language-sh, .language-output');
  const wide = code.scrollWidth > code.clientWidth && wraps;
  const cut = wide && code.textContent.split(/\\s+/).every(word => word.length < 40);  // a longer path scrolls
  return {text: code.textContent.slice(0, 60), covered, copied, cut};
})"""


@pytest.mark.parametrize("width", [390, 1280])
def test_lines_wrap_are_copied_as_they_are_and_no_button_covers_code(site, width):
    chromium, address, _ = site
    tab, _ = site_shots.watched(chromium, width, 844, "light")
    for page in ("quickstart/", "command_line/", "playbook/", "data/", "reference/callbacks/StepGuard/"):
        tab.goto(address + page)
        tab.wait_for_selector(".md-code__nav")
        blocks = tab.evaluate(CODE)
        assert blocks
        assert [block for block in blocks if block["covered"] or block["cut"] or not block["copied"]] == []


TOO_WIDE = """[...document.querySelectorAll('article table')].filter(
  t => t.scrollWidth > t.clientWidth + 2 || t.getBoundingClientRect().right > innerWidth).length"""


@pytest.mark.parametrize(
    "page", ["questions/", "existing_projects/", "reference/callbacks/StepGuard/", "reference/data/TextData/"]
)
def test_tables_of_words_fit_a_phone(site, page):
    chromium, address, _ = site
    tab, _ = site_shots.watched(chromium, 390, 844, "light")
    tab.goto(address + page)
    tab.wait_for_selector("article div > table")  # the theme puts it into a frame
    assert tab.evaluate(TOO_WIDE) == 0
