// Lets the site's search run from a folder (file://), where browsers start no Worker: its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.frame = frame;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = frame.contentDocument.createElement("script");
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${address}`));
          script.src = address;
          frame.contentDocument.body.append(script);
        });
      // what the script calls: a worker's two functions
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address);
      };
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
