"use strict";
setInterval(async () => {
  if (document.hidden || !getSelection().isCollapsed) return;
  try {
    const answer = await fetch(location.pathname, {cache: "no-store"});
    if (!answer.ok) throw answer;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const at = document.activeElement.getAttribute("href");
    document.title = fresh.title;
    for (const part of ["link[rel=icon]", "header.page", "main"])
      document.querySelector(part).replaceWith(fresh.querySelector(part));
    if (at) document.querySelector(`a[href="${CSS.escape(at)}"]`)?.focus({preventScroll: true});
  } catch {
    document.getElementById("lost").hidden = false;
  }
}, 5000);
