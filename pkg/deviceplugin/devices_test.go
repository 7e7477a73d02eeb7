package deviceplugin

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestDeviceIDs(t *testing.T) {
	for want, device := range map[string]struct {
		card int
		unit gpu.Memory
	}{
		"00":           {0, 0},
		"1A0":          {1, 620},
		"7zzz":         {7, 238327},
		"710000":       {7, 62 * 62 * 62 * 62},
		"y0":           {60, 0},
		"z00z0":        {61, 0},
		"zH33z":        {65537, 61},
		"0AzL8n0Y58m7": {0, 1<<63 - 1},
	} {
		if got := deviceID(device.card, device.unit); got != want {
			t.Errorf("deviceID(%d, %d) = %q, want %q", device.card, device.unit, got, want)
		}
	}
}

// TestMessageSize checks that the size, which is computed without making the devices, is the size of the message in gRPC.
func TestMessageSize(t *testing.T) {
	for _, cards := range [][]gpu.Card{
		nil,
		{{Index: 0, Memory: 0}},
		{{Index: 0, Memory: 1}},
		{{Index: 0, Memory: 62}, {Index: 1, Memory: 63}},
		{{Index: 0, Memory: 16276}, {Index: 1, Memory: 8138}, {Index: 75, Memory: 4000}},
	} {
		for i := range cards {
			cards[i].Unhealthy = "test"
		}
		want := proto.Size(&pluginapi.ListAndWatchResponse{Devices: devices(cards)})
		if got := messageSize(cards); got != int64(want) {
			t.Errorf("messageSize(%v) = %d, want %d", cards, got, want)
		}
	}
	// A missing card has the memory that the node's annotation names, which can be any number.
	for _, memory := range []gpu.Memory{math.MaxInt64, math.MaxInt64 / 64} {
		if got := messageSize(newCards(slices.Repeat([]gpu.Memory{memory}, 8)...)); got <= maxMessage {
			t.Errorf("the size of eight cards of %d is %d", memory, got)
		}
	}
}

func TestChooseDevices(t *testing.T) {
	for name, test := range map[string]struct {
		cards              []int
		available, include []string
		size               int
		want               []string
	}{
		"the card's devices":          {[]int{1}, []string{"00", "10", "01", "11"}, nil, 2, []string{"10", "11"}},
		"included devices come first": {[]int{1}, []string{"00", "10", "01", "11"}, []string{"01"}, 2, []string{"01", "10"}},
		"too few on the card":         {[]int{1}, []string{"00", "10"}, nil, 2, []string{"10", "00"}},
		"too few in all":              {[]int{1}, []string{"00"}, nil, 2, nil},
		"none requested":              {[]int{1}, []string{"00"}, nil, 0, nil},
		"a card with a long prefix": {
			[]int{100}, []string{deviceID(1, 0), deviceID(101, 0), deviceID(100, 7)}, nil, 2, []string{deviceID(100, 7), deviceID(1, 0)},
		},
		"more to be included than requested": {[]int{1}, []string{"00", "10", "01"}, []string{"00", "01"}, 1, []string{"00"}},
		"as many of each card":               {[]int{0, 2}, []string{"00", "01", "02", "10", "20", "21", "22"}, nil, 4, []string{"00", "01", "20", "21"}},
		"included devices count for their card": {
			[]int{0, 2}, []string{"00", "01", "02", "10", "20", "21", "22"}, []string{"02", "10"}, 4, []string{"02", "10", "00", "20"},
		},
		"too few on one of the cards": {[]int{0, 2}, []string{"00", "01", "10", "20"}, nil, 4, []string{"00", "01", "20", "10"}},
		"other IDs come last":         {[]int{0}, []string{"GPU-0-_-1", "00"}, nil, 1, []string{"00"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := chooseDevices(test.cards, test.available, test.include, test.size)
			if fmt.Sprint(got) != fmt.Sprint(test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}
