// Light or dark as the reader chose it before, else as the system has it; set before the first paint.
(() => {
  const stored = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // storage is not allowed
    }
  };
  const store = (theme) => {
    try {
      localStorage.setItem("theme", theme);
    } catch {
      // the choice lasts as long as the page
    }
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const now = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const follow = () => {
    if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  };
  follow();

  addEventListener("DOMContentLoaded", () => {
    if (location.protocol === "file:") {
      const how = "run python -m http.server in its folder, and open http://localhost:8000";
      document.getElementById("loading").textContent = `This page needs a web server, however small: ${how}.`;
    }
    const button = document.getElementById("theme");
    const name = () => {
      button.textContent = now() === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `${button.textContent} colours`);
    };
    button.addEventListener("click", () => {
      root.dataset.theme = now() === "dark" ? "light" : "dark";
      store(root.dataset.theme);
      name();
    });
    system.addEventListener("change", name);
    addEventListener("storage", () => (follow(), name())); // another tab has chosen
    name();
  });
})();
