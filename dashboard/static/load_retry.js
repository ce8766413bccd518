/** Loads the page again when one of its modules does not arrive: without all of them, none runs. */

(() => {
  const SLOW_MS = 20_000;
  const PAUSE_MS = 2_000;
  let isDue = false;

  function retry() {
    const place = document.querySelector("#app > .loading"); // gone once the modules run
    if (!place || isDue) return;
    isDue = true;
    place.textContent = "A part of the page did not arrive. Loading it again…";
    setTimeout(() => location.reload(), PAUSE_MS * (1 + Math.random()));
  }

  addEventListener("error", (event) => event.target?.type === "module" && retry(), true);
  setTimeout(retry, SLOW_MS);
})();
