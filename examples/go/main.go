// One call of each kind to a pyruntime server: go run . [HOST:PORT]
//
// Run `sh generate.sh` first, once. Retries: pass deploy/service-config.json to grpc.WithDefaultServiceConfig, as here.
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	_ "google.golang.org/grpc/health" // lets healthCheckConfig of the service config work
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "pyruntime-example/pyruntimev1"
)

const callTimeout = 60 * time.Second

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	connection, err := connect(address)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()

	served, err := models(connection)
	if err != nil {
		log.Fatal(err)
	}
	text, err := generate(connection, served[pb.Capability_CAPABILITY_GENERATE])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("generated:", text)
	if err := embed(connection, served[pb.Capability_CAPABILITY_EMBED]); err != nil {
		log.Fatal(err)
	}
	if err := score(connection, served[pb.Capability_CAPABILITY_SCORE]); err != nil {
		log.Fatal(err)
	}
	showError(connection, served[pb.Capability_CAPABILITY_GENERATE])
	showDeadline(connection, served[pb.Capability_CAPABILITY_GENERATE])
}

// connect makes the one connection that the program keeps. With TLS: grpc.WithTransportCredentials(credentials.NewTLS(...))
// and, for a token, grpc.WithPerRPCCredentials, in place of WithInsecure.
func connect(address string) (*grpc.ClientConn, error) {
	options := []grpc.DialOption{
		grpc.WithInsecure(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: time.Minute}),
	}
	if config, err := os.ReadFile(envOr("SERVICE_CONFIG", "../../deploy/service-config.json")); err == nil {
		options = append(options, grpc.WithDefaultServiceConfig(string(config)))
	}
	return grpc.Dial(address, options...)
}

// models says which model has which capability.
func models(connection *grpc.ClientConn) (map[pb.Capability]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	health, err := grpc_health_v1.NewHealthClient(connection).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		return nil, err
	}
	fmt.Println("health:", health.Status)
	response, err := pb.NewModelServiceClient(connection).ListModels(ctx, &pb.ListModelsRequest{})
	if err != nil {
		return nil, err
	}
	found := map[pb.Capability]string{}
	for _, model := range response.Models {
		for _, capability := range model.Capabilities {
			if _, known := found[capability]; !known {
				found[capability] = model.Name
			}
		}
	}
	return found, nil
}

// generate streams a continuation. Cancelling the context stops the server's work.
func generate(connection *grpc.ClientConn, model string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	stream, err := pb.NewGenerateServiceClient(connection).GenerateStream(ctx, &pb.GenerateRequest{
		Model:    model,
		Prompt:   &pb.GenerateRequest_Text{Text: "The three primary colours are"},
		Sampling: &pb.Sampling{Temperature: proto.Float32(0)},
		Stop:     &pb.Stop{MaxNewTokens: proto.Uint32(16)},
	})
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return text.String(), nil
		}
		if err != nil {
			return "", err
		}
		text.WriteString(chunk.Text)
	}
}

// embed asks for two vectors, one of a text that is blank: its error stands in its place.
func embed(connection *grpc.ClientConn, model string) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	response, err := pb.NewEmbedServiceClient(connection).Embed(ctx, &pb.EmbedRequest{
		Model:    model,
		Inputs:   []*pb.Input{text("A cat sits on the mat."), text(" ")},
		Encoding: pb.Encoding_ENCODING_FLOAT32_LE,
	})
	if err != nil {
		return err
	}
	for _, result := range response.Results {
		if problem := result.GetError(); problem != nil {
			fmt.Println("embedded:", result.Index, problem.Message)
			continue
		}
		packed := result.GetDense().Packed
		vector := make([]float32, len(packed)/4)
		for i := range vector {
			vector[i] = math.Float32frombits(binary.LittleEndian.Uint32(packed[4*i:]))
		}
		fmt.Println("embedded:", result.Index, len(vector), "numbers, the first", vector[0])
	}
	return nil
}

// score asks how likely each label is behind a query and each item.
func score(connection *grpc.ClientConn, model string) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	response, err := pb.NewScoreServiceClient(connection).Score(ctx, &pb.ScoreRequest{
		Model:        model,
		Query:        text("Is this an animal? "),
		Items:        []*pb.Input{text("A horse. Answer:"), text("A spoon. Answer:")},
		Labels:       strings.Split(envOr("LABELS", " yes, no"), ","),
		ApplySoftmax: true,
	})
	if err != nil {
		return err
	}
	for _, item := range response.Results {
		fmt.Println("scores:", item.Index, item.Scores)
	}
	return nil
}

// showError sends a bad request and prints what the server says of it, field by field.
func showError(connection *grpc.ClientConn, model string) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	var trailer metadata.MD
	ctx = metadata.AppendToOutgoingContext(ctx, "x-request-id", "go-example-1")
	_, err := pb.NewGenerateServiceClient(connection).Generate(ctx, &pb.GenerateRequest{
		Model:    model,
		Prompt:   &pb.GenerateRequest_Text{Text: "Hello"},
		Sampling: &pb.Sampling{Temperature: proto.Float32(-1)},
	}, grpc.Trailer(&trailer))
	problem := status.Convert(err)
	fmt.Println("error:", problem.Code(), trailer.Get("x-request-id"))
	for _, detail := range problem.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Println("  reason:", detail.Reason)
		case *errdetails.RetryInfo:
			fmt.Println("  try again after:", detail.RetryDelay.GetSeconds(), "s")
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Println("  field:", violation.Field, violation.Description)
			}
		}
	}
}

// showDeadline sends a call that has no time: the work ends on both sides.
func showDeadline(connection *grpc.ClientConn, model string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Microsecond)
	defer cancel()
	_, err := pb.NewGenerateServiceClient(connection).Generate(ctx, &pb.GenerateRequest{Model: model})
	fmt.Println("deadline:", status.Code(err) == codes.DeadlineExceeded)
}

func text(value string) *pb.Input {
	return &pb.Input{Value: &pb.Input_Text{Text: value}}
}

func envOr(name, otherwise string) string {
	if value, set := os.LookupEnv(name); set {
		return value
	}
	return otherwise
}
