// The one button that two pages share.

/** Light or dark, remembered where the browser allows it. */
function themeButton() {
  const root = document.documentElement;
  const stored = () => {
    try {
      return localStorage.getItem("sable-theme");
    } catch {
      return null;
    }
  };
  const store = (value) => {
    try {
      localStorage.setItem("sable-theme", value);
    } catch {
      // It is forgotten with the page.
    }
  };
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => {
    button.textContent = dark() ? "light" : "dark";
  };
  const button = make("button", {
    type: "button",
    id: "theme",
    "aria-label": "Change between light and dark",
    onclick: () => {
      root.dataset.theme = dark() ? "light" : "dark";
      store(root.dataset.theme);
      name();
    },
  });
  const theme = stored();
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  name();
  return button;
}
