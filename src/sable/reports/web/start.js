// Everything in reading order, then drawn as it comes into sight.

top();
bar();
document
  .getElementById("main")
  .append(...[wins(), notes(), beside(), chapters(), ...data.suites.map(section)].filter(Boolean));
document.getElementById("foot").append(make("p", { class: "small" }, data.made));
change({});
for (const one of charts) {
  sight.observe(one.place);
  size.observe(one.place);
}
addEventListener("beforeprint", () => drawSeen(true));
