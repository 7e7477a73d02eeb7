package inspect

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// maxUsage bounds the answer of a device plugin.
const maxUsage = 16 << 20

// forwarder asks device plugins over the API server's port-forward, which reaches their loopback listeners. It needs the right to
// create pods/portforward in their namespace. It opens no port on this machine: other users of it could read the answer there.
type forwarder struct {
	client kubernetes.Interface
	config *rest.Config
}

// Usage asks one device plugin.
func (f forwarder) Usage(ctx context.Context, plugin *corev1.Pod, port int) (protocol.Usage, error) {
	type answer struct {
		usage protocol.Usage
		err   error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer, 1)
	go func() { // The dialer knows no context.
		usage, err := f.ask(ctx, plugin, port)
		answers <- answer{usage, err}
	}()
	select {
	case <-ctx.Done():
		return protocol.Usage{}, ctx.Err()
	case a := <-answers:
		return a.usage, a.err
	}
}

func (f forwarder) ask(ctx context.Context, plugin *corev1.Pod, port int) (usage protocol.Usage, err error) {
	dialer, err := f.dialer(plugin)
	if err != nil {
		return usage, err
	}
	connection, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return usage, fmt.Errorf("forwarding its port: %w", err)
	}
	defer connection.Close()
	defer context.AfterFunc(ctx, func() { _ = connection.Close() })()
	stream := func(kind string) (httpstream.Stream, error) {
		return connection.CreateStream(http.Header{
			corev1.StreamType: {kind}, corev1.PortHeader: {strconv.Itoa(port)}, corev1.PortForwardRequestIDHeader: {"0"},
		})
	}
	failures, err := stream(corev1.StreamTypeError)
	if err != nil {
		return usage, fmt.Errorf("forwarding its port: %w", err)
	}
	_ = failures.Close() // Nothing is written to it.
	data, err := stream(corev1.StreamTypeData)
	if err != nil {
		return usage, fmt.Errorf("forwarding its port: %w", err)
	}
	usage, err = getUsage(data)
	if err != nil {
		_ = data.Reset() // The kubelet closes the other stream after this one.
		if text, _ := io.ReadAll(io.LimitReader(failures, 4096)); len(text) > 0 {
			err = errors.New(string(text))
		}
		return usage, err
	}
	return usage, nil
}

// dialer returns the connection to the API server: by WebSocket as kubectl makes it, or by SPDY if the server has no WebSocket
// for this (before Kubernetes 1.31).
func (f forwarder) dialer(plugin *corev1.Pod) (httpstream.Dialer, error) {
	url := f.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(plugin.Namespace).Name(plugin.Name).SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(f.config)
	if err != nil {
		return nil, err
	}
	websocket, err := portforward.NewSPDYOverWebsocketDialerForStreaming(url, f.config)
	if err != nil {
		return nil, err
	}
	fallBack := func(err error) bool { return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err) }
	old := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	return portforward.NewFallbackDialerForStreaming(websocket, old, fallBack), nil
}

// getUsage asks for the measured use over a connection to the plugin.
func getUsage(plugin io.ReadWriter) (usage protocol.Usage, err error) {
	request, err := http.NewRequest(http.MethodGet, "http://127.0.0.1/usage", nil)
	if err != nil {
		return usage, err
	}
	request.Close = true
	if err := request.Write(plugin); err != nil {
		return usage, fmt.Errorf("asking it: %w", err)
	}
	response, err := http.ReadResponse(bufio.NewReader(plugin), request)
	if err != nil {
		return usage, fmt.Errorf("reading its answer: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return usage, fmt.Errorf("it answers %s", response.Status)
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxUsage)).Decode(&usage); err != nil {
		return usage, fmt.Errorf("reading its answer: %w", err)
	}
	return usage, nil
}
