/** Loads the page again when one of its modules does not arrive: without all of them, none runs. */

(() => {
  const SLOW_MS = 10_000;
  const MOST_DOUBLINGS = 3;
  const PAUSE_MS = 2_000;
  const tries = Number(sessionStorage.getItem("loads")) || 0; // main.js forgets them
  let isDue = false;

  function retry() {
    const place = document.querySelector("#app > .loading"); // gone once the modules run
    if (!place || isDue) return;
    isDue = true;
    sessionStorage.setItem("loads", tries + 1);
    place.textContent = "A part of the page did not arrive. Loading it again…";
    setTimeout(() => location.reload(), PAUSE_MS * (1 + Math.random()));
  }

  addEventListener("error", (event) => event.target?.type === "module" && retry(), true);
  // A slow line gets longer each time, or it would never have them all.
  setTimeout(retry, SLOW_MS * 2 ** Math.min(tries, MOST_DOUBLINGS));
})();
