// The one button that two pages share.

/** Light or dark, remembered where the browser allows it. */
function themeButton() {
  const root = document.documentElement;
  const kept = (value) => {
    try {
      return value ? localStorage.setItem("sable-theme", value) : localStorage.getItem("sable-theme");
    } catch {
      return null;
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
      kept(root.dataset.theme);
      name();
    },
  });
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  name();
  return button;
}
