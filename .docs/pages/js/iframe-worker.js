// Offline search. From a file:// page a browser starts no Worker, so the theme's search runs in a hidden frame instead:
// the frame loads the worker's script, and messages pass between the two pages as they would between threads.
// The name of this file tells mkdocs-material's plugin "offline" not to fetch its own copy from another host.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.page = frame.contentWindow
      this.page.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.page.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.loaded = true
        this.waiting.splice(0).forEach(data => this.deliver(data))
      }
      this.page.document.body.appendChild(script)
    }

    postMessage(data) {
      this.loaded ? this.deliver(data) : this.waiting.push(data)
    }

    deliver(data) {
      this.page.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.page.frameElement.remove()
    }
  }
}
