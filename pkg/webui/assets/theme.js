// Loaded before the first paint, so that the page doesn't flash in the other theme.
"use strict";
(function () {
  const names = ["auto", "light", "dark"];
  let theme = "auto";
  try {
    const kept = localStorage.getItem("gpushare.theme");
    if (names.includes(kept)) theme = kept;
  } catch { /* No storage: the choice is lost with the page. */ }

  function apply() {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[theme];
      button.setAttribute("aria-label", "Theme: " + (theme === "auto" ? "as the system has it" : theme) + ". Change it");
    }
  }
  apply();
  document.addEventListener("DOMContentLoaded", function () {
    apply();
    document.getElementById("theme").addEventListener("click", function () {
      theme = names[(names.indexOf(theme) + 1) % names.length];
      try {
        localStorage.setItem("gpushare.theme", theme);
      } catch { /* As above. */ }
      apply();
    });
  });
})();
