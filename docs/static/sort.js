// Sorts tables of the class sortable by a click, or Enter, on the head of a column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.tabIndex = 0;
      head.title = "sort";
      const sort = () => {
        const up = head.getAttribute("aria-sort") === "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((one, other) => compare(value(one, column), value(other, column), up));
        table.tBodies[0].append(...rows);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => {
        if (event.key === "Enter") sort();
      });
    });
  }

  // A link to hidden lines opens them.
  const open = () => document.getElementById(location.hash.slice(1))?.setAttribute("open", "");
  addEventListener("hashchange", open);
  open();

  // The first number of a cell, else its text; a cell without either comes last.
  function value(row, column) {
    const cell = row.cells[column].cloneNode(true);
    cell.querySelectorAll("sup").forEach((mark) => mark.remove());
    const text = cell.textContent.trim().replaceAll(",", "");
    const number = text.match(/^[<+-]?\s*\d+(\.\d+)?/);
    if (number) return Number(number[0].replace("<", ""));
    return /\w/.test(text) ? text.toLowerCase() : null;
  }

  function compare(one, other, up) {
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
    // Texts start from A, numbers from the largest.
    const order = typeof one === "number" ? one - other : other.localeCompare(one);
    return up ? order : -order;
  }
});
