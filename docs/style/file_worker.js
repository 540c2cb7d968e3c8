/* Search on pages that were opened from disk. Browsers refuse workers there, so the worker's script runs in a hidden
   frame instead; messages pass as events. On a server the browser's own Worker stays. */
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.tell(this, data)
      this.inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve())
      this.load(url).then(() => {
        this.ready = true
        this.queue.forEach(data => this.tell(this.inside, data))
      })
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        script.src = url
        script.onload = done
        script.onerror = failed
        this.inside.document.body.appendChild(script)
      })
    }
    tell(whom, data) {
      const event = new MessageEvent("message", { data })
      whom.dispatchEvent(event)
      if (whom === this && this.onmessage) this.onmessage(event)
    }
    postMessage(data) {
      if (this.ready) this.tell(this.inside, data)
      else this.queue.push(data)
    }
  }
}
