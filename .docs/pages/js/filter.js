// A box above each long table, and each long list that opens, that shows only the rows with all the words typed.
document.addEventListener("DOMContentLoaded", () => {
  const LONG = 12
  const article = document.querySelector("article")
  if (!article) return
  const groups = [
    ...[...article.querySelectorAll("table:not([class])")].map(table => [table, [...table.querySelectorAll("tbody tr")]]),
    ...[...article.querySelectorAll("details > ul")].map(list => [list, [...list.children]]),
  ]
  for (const [whole, rows] of groups.filter(([, rows]) => rows.length >= LONG)) {
    const label = document.createElement("label")
    label.className = "posswap-filter"
    const box = document.createElement("input")
    box.type = "search"
    box.placeholder = "Filter: words that a row must contain"
    box.setAttribute("aria-label", "Filter the rows below")
    const count = document.createElement("output")
    label.append(box, count)
    whole.parentElement.insertBefore(label, whole)
    const texts = rows.map(row => row.textContent.toLowerCase())
    const apply = () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean)
      let shown = 0
      rows.forEach((row, number) => {
        row.hidden = !words.every(word => texts[number].includes(word))
        shown += !row.hidden
        for (const code of row.querySelectorAll("code")) {
          const text = code.textContent.toLowerCase()
          code.classList.toggle("posswap-match", words.some(word => text.includes(word)))
        }
      })
      count.textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length} rows`
    }
    box.addEventListener("input", apply)
    apply()
  }
})
